"""Tests that a class and its record name the same settings; otherwise selection fails and says what to write."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Callable
from functools import cache
from typing import Any

import click
import pytest
from pydantic import BaseModel, Field

import rllm_devkit.scripted_plugin
from rllm_core import hookimpl, providers
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.config import Section
from rllm_core.errors import PluginError
from rllm_core.plugins import PluginManager
from rllm_core.plugins.sections import WITH_OPTIONS, WITH_SECTION

Run = Callable[..., subprocess.CompletedProcess[str]]


class OneConfig(Section):
    """Keys of one."""

    key: int = Field(default=1, description="A number.")


class OtherConfig(Section):
    """Keys of another."""


class MoreConfig(OneConfig):
    """Inherited keys and one more."""

    more: int = Field(default=1, description="A number.")


ATTRIBUTES: dict[str, dict[str, Any]] = {
    "WithOne": {"config_model": OneConfig},
    "WithEmpty": {"config_model": OtherConfig},
    "WithNone": {},
}


@cache
def made(kind: type[providers.Provider], name: str) -> Any:
    """Makes a class, command or function that keeps the contract of a kind, and declares what its name says."""
    attributes = ATTRIBUTES[name]
    if kind is providers.CommandProvider:
        found: Any = click.Command(name)
    elif not kind.contract:
        found = type(name, (), {"__call__": lambda self, task, text: 0.0})()
    else:
        return type(name, (providers.resolve(kind.contract),), {"__module__": __name__, **attributes})
    vars(found).update(attributes)
    return found


def loaded(kind: type[providers.Provider], load: str, config: str | None) -> Any:
    """Selects and loads a record with these paths."""
    if load in ATTRIBUTES:
        globals()[load] = made(kind, load)

    def record() -> list[providers.Provider]:
        paths = {"load": f"{__name__}:{load}", "config": None if config is None else f"{__name__}:{config}"}
        return [kind(name="made-up", summary="Made up.", **paths)]  # type: ignore[arg-type]

    record.__name__ = kind.hook
    manager = PluginManager()
    manager.register(type("Plugin", (), {kind.hook: staticmethod(hookimpl(record))})(), "made")
    return manager.load(manager.select(kind, "made-up"))


@pytest.mark.parametrize("kind", providers.KINDS)
def test_what_agrees_is_loaded(kind: type[providers.Provider]) -> None:
    one, empty, none = (made(kind, name) for name in ATTRIBUTES)
    assert loaded(kind, "WithNone", None) is none
    assert loaded(kind, "WithEmpty", None) is empty
    if kind in WITH_SECTION:
        assert loaded(kind, "WithOne", "OneConfig") is one
        assert loaded(kind, "WithOne", "MoreConfig") is one, "every key that it reads is there"
    if kind in WITH_SECTION and kind is not providers.WorkflowProvider:
        assert loaded(kind, "WithNone", "OneConfig") is none, "it need not declare it"


@pytest.mark.parametrize("kind", providers.KINDS)
def test_what_breaks_the_contract_of_its_kind_is_refused_in_one_line(kind: type[providers.Provider]) -> None:
    wanted = {"": "a function that is called with two arguments, (task, text)", "click:Command": "a click.Command"}
    contract = wanted.get(kind.contract, f"a subclass of {kind.contract.replace(':', '.')}")
    with pytest.raises(PluginError) as raised:
        loaded(kind, "ATTRIBUTES", None)
    assert str(raised.value) == f"{kind.kind} 'made-up' (made): {__name__}:ATTRIBUTES must be {contract}"


@pytest.mark.parametrize("kind", providers.KINDS)
def test_settings_that_no_run_file_reaches_are_refused(kind: type[providers.Provider]) -> None:
    with pytest.raises(PluginError) as raised:
        loaded(kind, "WithOne", None)
    said = str(raised.value)
    assert said.startswith(f"{kind.kind} 'made-up' (made): class {__name__}:WithOne declares config_model = OneConfig")
    if kind in WITH_SECTION:
        assert said.endswith(f'write config="{__name__}:OneConfig" in the {kind.__name__}(...) record')
    elif kind in WITH_OPTIONS:
        assert said.endswith("which nothing reads; rename it to options_model")
    else:
        assert said.endswith(f"remove it: no {kind.kind} has settings")


@pytest.mark.parametrize("kind", WITH_SECTION)
def test_two_models_for_one_section_are_refused(kind: type[providers.Provider]) -> None:
    with pytest.raises(PluginError) as raised:
        loaded(kind, "WithOne", "OtherConfig")
    assert str(raised.value).endswith(
        f'declares config_model = OneConfig, but its record config="{__name__}:OtherConfig"; write config_model = '
        f'OtherConfig in the class, or config="{__name__}:OneConfig" in the {kind.__name__}(...) record'
    )
    with pytest.raises(PluginError, match=r"config='.*' in its record is a function, not a pydantic model; use a sub"):
        loaded(kind, "WithNone", "loaded")


@pytest.mark.parametrize("kind", [kind for kind in providers.KINDS if kind not in WITH_SECTION])
def test_a_section_where_there_is_none_is_refused(kind: type[providers.Provider]) -> None:
    with pytest.raises(PluginError, match=rf"config='.*', but no {kind.kind} has a section in a run file; "):
        loaded(kind, "WithNone", "OneConfig")


def test_every_first_party_class_agrees_with_its_record() -> None:
    manager = PluginManager.from_environment(no_plugins=True)  # other tests leave their packages on the path
    for module in ("rllm_local", "rllm_renderers", "rllm_workflows"):
        manager.register(importlib.import_module(module), module)
    found = 0
    for kind in (*WITH_SECTION, *WITH_OPTIONS, providers.SandboxProvider, providers.RewardFunctionProvider):
        for provided in manager.providers(kind).values():
            assert manager.load(provided) is not None
            found += 1
            if provided.record.config is not None:
                assert issubclass(manager.load(provided, provided.record.config), BaseModel)
    assert found > 20


FIXES = {
    "workflow unset": 'write config="rllm_unset.pieces:UnsetConfig" in the WorkflowProvider(...) record',
    "workflow otherwise": 'or config="rllm_unset.pieces:UnsetConfig" in the WorkflowProvider(...) record',
    "rollout host unset-host": 'write config="rllm_unset.pieces:TrackerConfig" in the RolloutHostProvider(...) record',
    "tracker unset-tracker": 'write config="rllm_unset.pieces:TrackerConfig" in the TrackerProvider(...) record',
    "advantage estimator sectioned": "which nothing reads; rename it to options_model",
    "correction configured": "declare options_model in its class and remove config",
    "sandbox walled": "but no sandbox has a section in a run file; remove it",
}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["unset.words=4"], FIXES["workflow unset"]),
        (["workflow=unset"], FIXES["workflow unset"]),
        (["workflow=otherwise"], FIXES["workflow otherwise"]),
        (["rollout.host=unset-host"], FIXES["rollout host unset-host"]),
        (["training.trackers=['unset-tracker']"], FIXES["tracker unset-tracker"]),
        (["algorithm.name=sectioned"], FIXES["advantage estimator sectioned"]),
        (["algorithm.corrections=['configured']"], FIXES["correction configured"]),
    ],
)
def test_a_run_that_selects_it_is_refused(
    manager: Callable[..., PluginManager], overrides: list[str], words: str
) -> None:

    plugins = manager("rllm-unset")
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    target = "unset" if overrides[0].startswith("unset") else "say_yes"
    with pytest.raises(PluginError) as raised:
        assemble(load_run_config(target, plugins, overrides=overrides, backend="scripted"), plugins)
    assert words in str(raised.value)
    assert "(rllm-unset 0.1)" in str(raised.value)


@pytest.mark.slow
def test_the_check_says_so_of_each(rllm_core: Run) -> None:
    run = rllm_core("plugins", "check", "unset", "--json", packages=("rllm-unset",))
    assert run.returncode == 1, run.stderr
    built = {
        f"{group['kind']} {group['name']}": group["checks"]
        for group in json.loads(run.stdout)["groups"]
        if f"{group['kind']} {group['name']}" in FIXES
    }
    assert built.keys() == FIXES.keys()
    for name, [check] in built.items():
        assert (check["name"], check["outcome"]) == ("built", "failed")
        assert FIXES[name] in check["detail"]
