"""Variants: ``NAME/VARIANT`` selects a workflow and one of its environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from rllm_core import hookimpl
from rllm_core.assembly.parts import Parts
from rllm_core.assembly.resolution import Resolved, load_run_config, resolve_run
from rllm_core.cli import Session
from rllm_core.cli.completion import provided
from rllm_core.config import to_toml
from rllm_core.errors import ConfigError, PluginError
from rllm_core.plugins import PluginManager, missing
from rllm_core.providers import BackendProvider, ParserProvider, WorkflowProvider
from rllm_core.runs.starting import folder_of
from rllm_core.workflow import Workflow, WorkflowConfig

VARIANTS = ["maze", "count_bits", "FrozenLake-v1", "gym/FrozenLake-v1"]
called: list[str] = []


class ZooConfig(WorkflowConfig):
    environment: str
    size: int = 1


class Zoo(Workflow):
    """A workflow that no test constructs."""

    config_model = ZooConfig


class Plain(Workflow):
    """The same, without environments."""


def variants() -> Sequence[str]:
    called.append("variants")
    return VARIANTS


def fails() -> Sequence[str]:
    raise RuntimeError("no library")


def garbage() -> Sequence[Any]:
    return ["fine", "two\nlines"]


def preset(given: Mapping[str, Any]) -> dict[str, Any]:
    steps = {"maze": 5, "count_bits": 7}.get(given.get("zoo", {}).get("environment", ""), 1)
    return {"training": {"steps": steps}}


class Offers:
    @hookimpl
    def workflows(self) -> list[WorkflowProvider]:
        def zoo(name: str, function: str) -> WorkflowProvider:
            return WorkflowProvider(
                name=name,
                load=f"{__name__}:Zoo",
                config=f"{__name__}:ZooConfig",
                run_file=f"{__name__}:preset",
                variants=f"{__name__}:{function}",
                summary="Animals.",
            )

        return [
            zoo("zoo", "variants"),
            zoo("failing", "fails"),
            zoo("odd", "garbage"),
            WorkflowProvider(name="plain", load=f"{__name__}:Plain", summary="None."),
        ]

    @hookimpl
    def backends(self) -> list[BackendProvider]:
        return [BackendProvider(name="local", load=f"{__name__}:Nothing", default_parser="text", summary="A toy.")]

    @hookimpl
    def parsers(self) -> list[ParserProvider]:
        return [ParserProvider(name="text", load=f"{__name__}:Nothing", summary="A parser.")]


@pytest.fixture
def plugins() -> PluginManager:
    called.clear()
    manager = PluginManager.from_environment(no_plugins=True)
    manager.register(Offers(), "offers")
    return manager


@pytest.mark.parametrize(
    ("target", "workflow", "environment"),
    [
        ("zoo/maze", "zoo", "maze"),
        ("zoo/gym/FrozenLake-v1", "zoo", "gym/FrozenLake-v1"),
        ("offers/zoo/count_bits", "offers/zoo", "count_bits"),
    ],
)
def test_a_name_may_end_with_a_variant(plugins: PluginManager, target: str, workflow: str, environment: str) -> None:
    config = load_run_config(target, plugins)
    assert config.workflow == workflow
    assert config.plugins[workflow].environment == environment


def test_it_is_the_same_in_a_run_file_and_as_an_option(plugins: PluginManager, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('workflow = "zoo/maze"\n[zoo]\nsize = 3\n', encoding="utf-8")
    resolved = resolve_run(str(tmp_path / "run.toml"), plugins)
    assert resolved.config.plugins["zoo"].model_dump() == {"environment": "maze", "size": 3}
    assert resolved.sources["zoo.environment"] == "file"
    resolved = resolve_run(str(tmp_path / "run.toml"), plugins, overrides=["workflow=zoo/count_bits"])
    assert resolved.config.plugins["zoo"].model_dump() == {"environment": "count_bits", "size": 3}
    assert resolved.sources["zoo.environment"] == "option"
    again = tmp_path / "again.toml"
    again.write_text(to_toml(resolved.config.to_tables()), encoding="utf-8")
    assert load_run_config(str(again), plugins) == resolved.config


def test_the_preset_may_depend_on_the_variant(plugins: PluginManager) -> None:
    assert load_run_config("zoo/maze", plugins).training.steps == 5
    assert load_run_config("zoo/count_bits", plugins).training.steps == 7
    assert load_run_config("zoo", plugins, overrides=["zoo.environment=count_bits"]).training.steps == 7
    assert load_run_config("zoo/maze", plugins, overrides=["training.steps=9"]).training.steps == 9


def test_a_qualified_name_still_selects_a_workflow(plugins: PluginManager) -> None:
    assert load_run_config("offers/plain", plugins).workflow == "offers/plain"
    config = load_run_config("Offers/zoo", plugins, overrides=['"Offers/zoo".environment=maze'])
    assert (config.workflow, config.training.steps) == ("Offers/zoo", 1)
    assert called == []


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("zoo/maize", "zoo' has no variant 'maize'; did you mean maze?"),
        ("zoo/frozenlake-v2", "did you mean FrozenLake-v1"),
        ("zoo/qqqq", "it has 4, such as maze, count_bits"),
        ("zoo/my-maze", "zoo.environment = 'my-maze'"),
        ("zoo/", "no variant ''"),
        ("plain/maze", "workflow 'plain' has no variants"),
        ("zoo", "name one of its 4 environments, such as zoo/maze, zoo/count_bits"),
    ],
)
def test_a_wrong_variant_is_refused_in_one_line(plugins: PluginManager, target: str, error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_run_config(target, plugins)
    assert error in str(raised.value)
    assert "\n" not in str(raised.value)


def test_two_variants_are_refused(plugins: PluginManager) -> None:
    with pytest.raises(ConfigError, match=r"zoo\.environment = 'count_bits' name two"):
        load_run_config("zoo/maze", plugins, overrides=["zoo.environment=count_bits"])
    assert load_run_config("zoo/maze", plugins, overrides=["zoo.environment=maze"]).training.steps == 5


def test_a_function_that_fails_is_its_plugins_fault(plugins: PluginManager) -> None:
    with pytest.raises(PluginError, match=r"its variants failed: .*no library"):
        load_run_config("failing/maze", plugins)
    with pytest.raises(PluginError, match="not a printable name"):
        load_run_config("odd/fine", plugins)


def test_a_workflow_that_is_not_installed(plugins: PluginManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing, "first_party", lambda: {(WorkflowProvider, "atlas"): "rllm-atlas"})
    with pytest.raises(PluginError, match="pip install rllm-atlas"):
        load_run_config("atlas/maze", plugins)


def completed(plugins: PluginManager, incomplete: str) -> list[str]:
    session = Session()
    session.plugins = plugins
    context = click.Context(click.Command("train"), obj=session)
    return [item.value for item in provided("Workflow")(context, click.Argument(["target"]), incomplete)]


def test_a_misspelt_workflow_with_a_variant(plugins: PluginManager) -> None:
    with pytest.raises(PluginError, match="did you mean 'zoo'"):
        load_run_config("zooo/maze", plugins)


def test_completion(plugins: PluginManager) -> None:
    assert completed(plugins, "") == ["failing", "odd", "plain", "zoo"]
    assert called == [], "no function is called to list workflows"
    assert completed(plugins, "z") == [f"zoo/{name}" for name in VARIANTS]
    assert completed(plugins, "zoo/gym/") == ["zoo/gym/FrozenLake-v1"]
    assert completed(plugins, "pl") == ["plain"]
    assert completed(plugins, "plain/") == completed(plugins, "failing/") == []


@pytest.mark.parametrize(
    ("target", "start"),
    [("zoo/gym/FrozenLake-v1", "zoo-gym-FrozenLake-v1-"), ("offers/zoo/maze", "offers-zoo-maze-"), ("plain", "plain-")],
)
def test_the_run_folder_is_one_folder(plugins: PluginManager, target: str, start: str) -> None:
    path = folder_of(parts_with(resolve_run(target, plugins)), None)
    assert path.parent == Path("runs")
    assert path.name.startswith(start)


def parts_with(resolved: Resolved) -> Parts:
    parts: Any = object.__new__(Parts)
    object.__setattr__(parts, "resolved", resolved)
    return parts
