"""Tests that every hook does what its documentation says, and that every hook is documented and listed here."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rllm_core import hookimpl, hookspecs, providers
from rllm_core.observers import Observers
from rllm_core.plugins import PluginManager

DOCUMENTATION = Path(__file__).parent.parent.parent / "docs" / "hooks.md"
SPECS: dict[str, Callable[..., Any]] = {
    name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, "rllm_core_spec")
}

WITH_RESULTS = ("save_plugin_state", "load_plugin_state", "remarks", "closing_lines")


def signature(name: str) -> str:
    return f"{name}({', '.join(inspect.signature(SPECS[name]).parameters)})"


def test_the_documentation_has_a_heading_for_every_hook_in_order() -> None:
    headings = re.findall(r"^### (\w+\(.*\))$", DOCUMENTATION.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings == [signature(name) for name in SPECS]


@pytest.mark.parametrize("name", SPECS)
def test_the_documentation_says_what_the_spec_says(name: str) -> None:
    text = " ".join(DOCUMENTATION.read_text(encoding="utf-8").split())
    section = text.partition(f"### {signature(name)}")[2].partition("###")[0]
    first = " ".join((inspect.getdoc(SPECS[name]) or "").split("\n\n")[0].split())
    assert first
    assert first in section


@pytest.mark.parametrize("name", SPECS)
def test_every_hook_is_named_by_a_test(name: str) -> None:
    assert f"test_hook_{name}" in globals()


def test_every_provider_kind_has_its_hook() -> None:
    assert {kind.hook for kind in providers.KINDS} == {
        name for name in SPECS if not name.startswith("on_") and name not in WITH_RESULTS
    }


def plugin(name: str, function: Callable[..., object]) -> object:
    holder = type("Plugin", (), {name: staticmethod(hookimpl(function))})
    return holder()


def provides(kind: type[providers.Provider]) -> None:
    """Checks that a record returned by the hook can be selected by name, and that its target loads."""
    path = {"": "fnmatch:fnmatch", "click:Command": "rllm_core.cli.doctor:doctor"}.get(kind.contract, kind.contract)
    record = kind(name="made-up", load=path, summary="Made up.")
    manager = PluginManager()
    manager.register(plugin(kind.hook, lambda: [record]), "mine")
    chosen = manager.select(kind, "made-up")
    assert chosen.record is record
    assert chosen.plugin.name == "mine"
    assert manager.load(chosen) is providers.resolve(path)
    for other in providers.KINDS:
        assert other is kind or "made-up" not in manager.providers(other)


def test_hook_backends() -> None:
    provides(providers.BackendProvider)


def test_hook_rollout_engines() -> None:
    provides(providers.EngineProvider)


def test_hook_parsers() -> None:
    provides(providers.ParserProvider)


def test_hook_workflows() -> None:
    provides(providers.WorkflowProvider)


def test_hook_rollout_hosts() -> None:
    provides(providers.RolloutHostProvider)


def test_hook_trackers() -> None:
    provides(providers.TrackerProvider)


def test_hook_advantage_estimators() -> None:
    provides(providers.AdvantageEstimatorProvider)


def test_hook_policy_losses() -> None:
    provides(providers.PolicyLossProvider)


def test_hook_corrections() -> None:
    provides(providers.CorrectionProvider)


def test_hook_group_scorers() -> None:
    provides(providers.GroupScorerProvider)


def test_hook_task_samplers() -> None:
    provides(providers.TaskSamplerProvider)


def test_hook_reward_functions() -> None:
    provides(providers.RewardFunctionProvider)


def test_hook_sandboxes() -> None:
    provides(providers.SandboxProvider)


def test_hook_cli_commands() -> None:
    provides(providers.CommandProvider)


class Listener:
    """Plugin that implements every observer hook."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []

    @hookimpl
    def on_train_start(self, state: Any) -> None:
        self.heard.append(("on_train_start", {"state": state}))

    @hookimpl
    async def on_train_end(self, state: Any, status: Any) -> None:
        self.heard.append(("on_train_end", {"state": state, "status": status}))

    @hookimpl
    def on_epoch_start(self, state: Any, epoch: Any) -> None:
        self.heard.append(("on_epoch_start", {"state": state, "epoch": epoch}))

    @hookimpl
    async def on_epoch_end(self, state: Any, epoch: Any) -> None:
        self.heard.append(("on_epoch_end", {"state": state, "epoch": epoch}))

    @hookimpl
    def on_batch_start(self, state: Any, step: Any) -> None:
        self.heard.append(("on_batch_start", {"state": state, "step": step}))

    @hookimpl
    async def on_batch_end(self, state: Any, step: Any, metrics: Any) -> None:
        self.heard.append(("on_batch_end", {"state": state, "step": step, "metrics": metrics}))

    @hookimpl
    def on_validation_start(self, state: Any, step: Any) -> None:
        self.heard.append(("on_validation_start", {"state": state, "step": step}))

    @hookimpl
    async def on_validation_end(self, state: Any, step: Any, metrics: Any) -> None:
        self.heard.append(("on_validation_end", {"state": state, "step": step, "metrics": metrics}))

    @hookimpl
    def on_episode_finished(self, state: Any, episode: Any) -> None:
        self.heard.append(("on_episode_finished", {"state": state, "episode": episode}))

    @hookimpl
    async def on_checkpoint_saved(self, state: Any, step: Any, directory: Any) -> None:
        self.heard.append(("on_checkpoint_saved", {"state": state, "step": step, "directory": directory}))

    @hookimpl
    def on_policy_updated(self, update: Any, state: Any) -> None:
        self.heard.append(("on_policy_updated", {"update": update, "state": state}))


def hears(hook: str, **arguments: object) -> None:
    """Checks that observers receive the arguments they name, and that no other hook is called."""
    part = []

    def less(state: object) -> None:
        part.append(state)

    listener = Listener()
    manager = PluginManager()
    manager.register(listener, "all")
    manager.register(plugin(hook, less), "less")
    observers = Observers(manager)
    asyncio.run(observers.notify(hook, **arguments))
    assert listener.heard == [(hook, arguments)]
    assert part == [arguments["state"]]
    assert not observers.failures


def test_hook_on_train_start() -> None:
    hears("on_train_start", state="a state")


def test_hook_on_train_end() -> None:
    hears("on_train_end", state="a state", status="completed")


def test_hook_on_epoch_start() -> None:
    hears("on_epoch_start", state="a state", epoch=0)


def test_hook_on_epoch_end() -> None:
    hears("on_epoch_end", state="a state", epoch=0)


def test_hook_on_batch_start() -> None:
    hears("on_batch_start", state="a state", step=1)


def test_hook_on_batch_end() -> None:
    hears("on_batch_end", state="a state", step=1, metrics={"loss": 0.5})


def test_hook_on_validation_start() -> None:
    hears("on_validation_start", state="a state", step=0)


def test_hook_on_validation_end() -> None:
    hears("on_validation_end", state="a state", step=0, metrics={"solved": 0.1})


def test_hook_on_episode_finished() -> None:
    hears("on_episode_finished", state="a state", episode="a episode")


def test_hook_on_checkpoint_saved() -> None:
    hears("on_checkpoint_saved", state="a state", step=3, directory=Path("checkpoints/step-000003"))


def test_hook_on_policy_updated() -> None:
    hears("on_policy_updated", update="a update", state="a state")


def test_hook_save_plugin_state() -> None:
    """Collects returned states by plugin name, and passes each plugin the arguments it names."""
    manager = PluginManager()
    manager.register(plugin("save_plugin_state", lambda state: {"step": state["step"]}), "all")
    manager.register(plugin("save_plugin_state", lambda: {"level": 3}), "less")
    manager.register(plugin("save_plugin_state", lambda: None), "nothing")
    observers = Observers(manager)
    answers = asyncio.run(observers.save_states({"step": 5}))
    assert answers == {"all": {"step": 5}, "less": {"level": 3}, "nothing": None}
    assert not observers.failures


def test_hook_load_plugin_state() -> None:
    """Passes each plugin its own state and no other."""
    got: list[object] = []
    manager = PluginManager()
    manager.register(plugin("load_plugin_state", lambda state, saved: got.append((state, saved))), "all")
    manager.register(plugin("load_plugin_state", lambda saved: got.append(saved)), "less")
    manager.register(plugin("load_plugin_state", lambda saved: got.append("not called")), "without")
    observers = Observers(manager)
    saved = {"all": {"step": 5}, "less": {"level": 3}, "elsewhere": {}}
    assert asyncio.run(observers.load_states("now", saved)) == {"all", "less"}
    assert got == [("now", {"step": 5}), {"level": 3}]
    assert not observers.failures


def lines_of(hook: str, *functions: Callable[..., object], **arguments: object) -> tuple[list[str], Observers]:
    manager = PluginManager()
    for number, function in enumerate(functions):
        manager.register(plugin(hook, function), f"p{number}")
    observers = Observers(manager)
    return asyncio.run(observers.lines(hook, **arguments)), observers


def test_hook_remarks() -> None:
    """Collects the lines of all plugins, in order, each with the arguments it names."""
    said, observers = lines_of(
        "remarks",
        lambda state, metrics: [f"{state}: {metrics['loss']}", "more"],
        lambda books: [f"{reason} {count}" for reason, count in books["failed"].items()],
        lambda: None,
        state="now",
        metrics={"loss": 0.5},
        books={"failed": {"error": 2}},
    )
    assert said == ["now: 0.5", "more", "error 2"]
    assert not observers.failures


def test_hook_closing_lines() -> None:
    """Shows no control character of a plugin, and reports one that returns something else."""
    said, observers = lines_of(
        "closing_lines", lambda summary: [f"\x1b[31m{summary['status']}"], lambda: [3], run_dir=Path("r"),
        summary={"status": "completed"},
    )  # fmt: skip
    assert said == [" [31mcompleted"]
    assert observers.failures == {"p1": 1}
