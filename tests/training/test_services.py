"""Tests the services of workflows, and that everything workflows start is stopped."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

import rllm_devkit.scripted_plugin
from rllm_core import hookimpl
from rllm_core.assembly.parts import Parts, assemble, host_of, parts_of, workflow_of
from rllm_core.assembly.resolution import load_run_config, resolve_run
from rllm_core.builtin.sandbox import ChildSandbox
from rllm_core.errors import ConfigError, PluginError, RunError, StallError
from rllm_core.plugins import PluginManager
from rllm_core.providers import RewardFunctionProvider, SandboxProvider
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import evaluation, launch
from rllm_core.sandbox import ChildDied, ChildError, ChildRaised, ChildTimeout, Limits
from rllm_core.services import Services
from rllm_core.types import Task
from rllm_devkit.scripted import ScriptedBackend, ScriptedEngine, ScriptedWorkflow

REWARDS = """
import os
import time
from fractions import Fraction

import numpy as np

def of_numpy(task, text):
    return np.float32(0.5), {"share": np.int64(3), "is_right": np.bool_(True)}

def exact(task, text):
    return Fraction(3, 4)

def huge(task, text):
    return 10**400

def set_of_parts(task, text):
    return 1, {"letters": set("a")}

def nameless_part(task, text):
    return 1, {"": 0.5}

def length(task, text):
    return len(text) / task.data["longest"]

def whole(task, text):
    return text == task.task_id

def endless(task, text):
    time.sleep(300)

def words(task, text):
    return "much"

def infinite(task, text):
    return float("inf")

def raises(task, text):
    raise KeyError(text)

def together(task, text):
    open(os.path.join(text, str(os.getpid())), "w").close()
    while len(os.listdir(text)) < 6:
        time.sleep(0.01)
    return 1

def dies(task, text):
    # only in the first call, if the text is the name of a file
    if not os.path.exists(text):
        if text:
            open(text, "w").close()
        os.kill(os.getpid(), 9)
    return 1
"""


class Rewards:
    @hookimpl
    def reward_functions(self) -> list[RewardFunctionProvider]:
        names = ("length", "whole", "endless", "words", "infinite", "raises", "dies", "absent")
        names += ("of_numpy", "exact", "huge", "set_of_parts", "nameless_part")
        together = RewardFunctionProvider(name="together", load="planted_rewards:together", summary="One.", processes=6)
        return [
            *(RewardFunctionProvider(name=name, load=f"planted_rewards:{name}", summary="One.") for name in names),
            together,
        ]


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Services:
    """Services of a plugin whose module is on the path of child processes."""
    (tmp_path / "planted_rewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins = PluginManager()
    plugins.register(Rewards(), "rewards")
    return Services(plugins)


def closed(services: Services, awaitable: Any) -> Any:
    async def run() -> Any:
        try:
            return await awaitable
        finally:
            await services.close()

    return asyncio.run(run())


def test_a_reward_function_gets_the_task_and_the_text(services: Services) -> None:
    assert closed(services, services.reward_function("length")(Task(task_id="t", data={"longest": 4}), "abc")) == 0.75


def test_as_many_calls_run_at_a_time_as_the_record_says(services: Services, tmp_path: Path) -> None:
    (tmp_path / "met").mkdir()
    together = services.reward_function("together", Limits(wall_seconds=60.0))

    async def all_six() -> list[float]:
        return await asyncio.gather(*(together(Task(task_id="t"), str(tmp_path / "met")) for _ in range(6)))

    assert closed(services, all_six()) == [1.0] * 6


def test_true_and_false_are_one_and_zero(services: Services) -> None:
    whole = services.reward_function("whole")

    async def both() -> list[float]:
        return [await whole(Task(task_id="t"), text) for text in ("t", "u")]

    assert closed(services, both()) == [1.0, 0.0]


def test_exact_numbers_are_numbers(services: Services) -> None:
    assert closed(services, services.reward_function("exact")(Task(task_id="t"), "abc")) == 0.75


def test_numbers_of_numpy_are_numbers(services: Services) -> None:
    score = closed(services, services.reward_function("of_numpy")(Task(task_id="t"), "abc"))
    assert (score, score.parts) == (0.5, {"share": 3.0, "is_right": 1.0})


@pytest.mark.slow
def test_services_work_again_after_they_were_closed(services: Services) -> None:
    length = services.reward_function("length")
    for _ in range(2):
        assert closed(services, length(Task(task_id="t", data={"longest": 4}), "abcd")) == 1.0
        assert closed(services, services.sandbox.run_python("print(1)")).stdout == "1\n"


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        pytest.param("endless", ChildTimeout, "longer than 1 s", marks=pytest.mark.slow),
        ("raises", ChildRaised, r"^reward function raises \(.*planted_rewards.py:\d+\) raised KeyError: 'abc'$"),
        ("huge", ValueError, r"reward function 'huge' .*returned 1000+, not a finite number"),
        ("set_of_parts", ValueError, r"returned the part \('letters', \{'a'\}\); a part has a name, and is"),
        ("nameless_part", ValueError, r"returned the part \('', 0.5\); a part has a name, and is"),
        ("words", ValueError, "reward function 'words' .*returned 'much', not a finite number"),
        ("infinite", ValueError, "reward function 'infinite' .*returned inf, not a finite number"),
    ],
)
def test_what_is_no_reward_is_an_error(services: Services, name: str, error: type[Exception], message: str) -> None:
    reward = services.reward_function(name, Limits(wall_seconds=1.0 if error is ChildTimeout else 60.0))
    with pytest.raises(error, match=message):
        closed(services, reward(Task(task_id="t"), "abc"))


@pytest.mark.parametrize(
    ("name", "kinds", "score", "rejected"),
    [
        ("raises", (ChildRaised,), 0.0, 1.0),
        ("raises", (ChildError,), 0.0, 1.0),
        pytest.param("endless", (ChildRaised, ChildTimeout), 0.0, 1.0, marks=pytest.mark.slow),
        ("length", (ChildRaised,), 0.75, 0.0),
    ],
)
def test_an_error_may_be_the_fault_of_the_text(
    services: Services, name: str, kinds: tuple[type[ChildError], ...], score: float, rejected: float
) -> None:
    limits = Limits(wall_seconds=1.0 if name == "endless" else 60.0)
    reward = services.reward_function(name, limits, blame_text=kinds)
    given = closed(services, reward(Task(task_id="t", data={"longest": 4}), "abc"))
    assert given == score
    assert given.numbers == {"rejected": rejected}, "0 counts, too: the metric is a mean over the rollouts with it"


@pytest.mark.parametrize(("name", "error"), [("raises", ChildRaised), ("words", ValueError)])
def test_other_errors_stay_errors(services: Services, name: str, error: type[Exception]) -> None:
    reward = services.reward_function(name, blame_text=(ChildTimeout,))
    with pytest.raises(error):
        closed(services, reward(Task(task_id="t"), "abc"))


@pytest.mark.slow
def test_a_call_whose_process_dies_is_repeated_once(services: Services, tmp_path: Path) -> None:
    reward = services.reward_function("dies", blame_text=(ChildDied,))
    once = closed(services, reward(Task(task_id="t"), str(tmp_path / "killed")))
    assert (once, once.numbers) == (1.0, {"rejected": 0.0})
    always = closed(services, reward(Task(task_id="t"), ""))
    assert (always, always.numbers) == (0.0, {"rejected": 1.0})
    with pytest.raises(ChildDied):
        closed(services, services.reward_function("dies")(Task(task_id="t"), ""))


def test_a_reward_function_that_is_not_there_says_so_before_the_first_rollout(services: Services) -> None:
    with pytest.raises(PluginError, match="no reward function named 'lenght'; did you mean 'length'"):
        services.reward_function("lenght")
    with pytest.raises(PluginError, match=r"reward function 'absent' .* cannot be loaded from planted_rewards:absent"):
        services.reward_function("absent")


def test_a_workflow_by_itself_has_what_is_installed() -> None:
    workflow = ScriptedWorkflow()
    result = closed(workflow.services, workflow.services.sandbox.run_python("print(6 * 7)"))
    assert result.stdout == "42\n"


# --------------------------------------------------------------------------------------------------------------------
# Sandboxes that isolate


class Isolating(ChildSandbox):
    isolates = True


class Elsewhere(Isolating):
    @classmethod
    def unavailable(cls) -> str | None:
        return "it needs another kernel; boot one"


def with_sandboxes(chosen: str, *names: str) -> Services:
    class Provided:
        @hookimpl
        def sandboxes(self) -> list[SandboxProvider]:
            return [SandboxProvider(name=name.lower(), load=f"{__name__}:{name}", summary="One.") for name in names]

    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(Provided(), "provided")
    return Services(plugins, chosen)


def test_the_sandbox_of_the_run_file_is_used_if_it_isolates() -> None:
    services = with_sandboxes("isolating", "Isolating", "Elsewhere")
    assert services.isolating_sandbox() is services.sandbox
    assert services.isolating_sandbox() is services.isolating_sandbox()


def test_an_installed_sandbox_that_isolates_and_works_is_chosen() -> None:
    services = with_sandboxes("child", "Elsewhere", "Isolating", "ChildSandbox")
    found = services.isolating_sandbox()
    assert type(found).__name__ == "Isolating"
    assert found is services.isolating_sandbox()
    assert not services.sandbox.isolates


def test_both_sandboxes_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed_ones = []

    async def close(self: ChildSandbox) -> None:
        closed_ones.append(type(self).__name__)

    monkeypatch.setattr(ChildSandbox, "close", close)
    services = with_sandboxes("child", "Isolating")
    assert services.sandbox is not services.isolating_sandbox()
    asyncio.run(services.close())
    alone = with_sandboxes("isolating", "Isolating")
    assert alone.sandbox is alone.isolating_sandbox()
    asyncio.run(alone.close())
    assert sorted(closed_ones) == ["ChildSandbox", "Isolating", "Isolating"]


def test_a_sandbox_that_cannot_be_closed_does_not_keep_the_other_one_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed_ones = []

    async def close(self: ChildSandbox) -> None:
        closed_ones.append(type(self).__name__)
        raise RuntimeError("busy")

    monkeypatch.setattr(ChildSandbox, "close", close)
    services = with_sandboxes("child", "Isolating")
    assert services.sandbox is not services.isolating_sandbox()
    with pytest.raises(RuntimeError, match="busy"):
        asyncio.run(services.close())
    assert sorted(closed_ones) == ["ChildSandbox", "Isolating"]


@pytest.mark.parametrize(
    ("chosen", "names", "message"),
    [
        ("child", (), "rollout.sandbox = 'child' does not isolate.*pip install rllm-bwrap"),
        ("child", ("Elsewhere",), "'elsewhere' does not work on this machine: it needs another kernel; boot one"),
        ("elsewhere", ("Elsewhere", "Isolating"), "rollout.sandbox = 'elsewhere' does not work .* boot one"),
    ],
)
def test_without_isolation_one_line_says_why(chosen: str, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        with_sandboxes(chosen, *names).isolating_sandbox()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [False, "", " ", ["no kernel"]])
def test_a_reason_that_is_none_is_the_plugins_fault(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setattr(Elsewhere, "unavailable", classmethod(lambda _: wrong))
    with pytest.raises(PluginError, match=r"sandbox 'elsewhere'.*returned"):
        _ = with_sandboxes("elsewhere", "Elsewhere").sandbox
    with pytest.raises(PluginError, match=r"sandbox 'elsewhere'.*returned"):
        with_sandboxes("child", "Elsewhere").isolating_sandbox()


def test_a_reason_of_several_lines_becomes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Elsewhere, "unavailable", classmethod(lambda _: "no kernel:\nboot one"))
    with pytest.raises(ConfigError, match="on this machine: no kernel: boot one"):
        _ = with_sandboxes("elsewhere", "Elsewhere").sandbox


# --------------------------------------------------------------------------------------------------------------------
# In a run


class Recorded(ScriptedWorkflow):
    """Workflow that records its calls and runs a test's functions in them."""

    calls: ClassVar[list[str]] = []
    opening: ClassVar[Callable[[], Any]] = staticmethod(lambda: None)
    closing: ClassVar[Callable[[], Any]] = staticmethod(lambda: None)

    async def open(self) -> None:
        self.calls.append("open")
        await asyncio.sleep(self.opening() or 0)

    async def close(self) -> None:
        self.calls.append("close")
        await asyncio.sleep(self.closing() or 0)

    async def run(self, task: Task, completer: Any) -> Any:
        self.calls.append("run")
        return await super().run(task, completer)


class OwnSandbox(ChildSandbox):
    closed = 0

    async def close(self) -> None:
        type(self).closed += 1
        await super().close()


class Isolation:
    @hookimpl
    def sandboxes(self) -> list[SandboxProvider]:
        return [
            SandboxProvider(name="own", load=f"{__name__}:OwnSandbox", summary="Ours."),
            SandboxProvider(name="elsewhere", load=f"{__name__}:Elsewhere", summary="Theirs."),
        ]


@pytest.fixture
def assembly(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Parts]:
    monkeypatch.setattr(rllm_devkit.scripted, "ScriptedWorkflow", Recorded)
    monkeypatch.setattr(Recorded, "calls", [])

    def assembled(*overrides: str) -> Parts:
        plugins = PluginManager.from_environment(no_plugins=True)
        plugins.register(rllm_devkit.scripted_plugin, "testing")
        plugins.register(Isolation(), "isolation")
        small = ("training.steps=1", "training.groups_per_step=2", "training.rollouts_per_group=2",
                 "training.validation_rollouts=2")  # fmt: skip
        config = load_run_config("say_yes", plugins, overrides=(*small, *overrides), backend="scripted")
        return assemble(config, plugins)

    return assembled


def train(assembly: Parts, folder: Path) -> dict[str, Any]:
    try:
        asyncio.run(launch.train(assembly, folder, resume=False, progress=Progress()))
    finally:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


@pytest.mark.slow
def test_a_workflow_is_opened_before_and_closed_after_all_rollouts(
    assembly: Callable[..., Parts], tmp_path: Path
) -> None:
    train(assembly(), tmp_path / "run")
    first, *between, last = Recorded.calls
    assert (first, set(between), last) == ("open", {"run"}, "close")


def test_an_evaluation_opens_and_closes_it_too(assembly: Callable[..., Parts]) -> None:
    a = assembly()
    opening = evaluation.engine_of_backend(a, None)
    asyncio.run(evaluation.evaluate(a.resolved, a.host, opening, split="train", task_limit=2, samples=2, ks=(1,)))
    first, *between, last = Recorded.calls
    assert (first, set(between), last) == ("open", {"run"}, "close")


@pytest.mark.parametrize(("opened", "method"), [("backend", "shutdown"), ("engine", "sleep")])
def test_an_evaluation_keeps_its_result_if_what_it_asked_cannot_be_closed(
    plugins: PluginManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, opened: str, method: str
) -> None:
    async def fails(self: object) -> None:
        raise ValueError("cannot stop")

    monkeypatch.setattr(ScriptedBackend if opened == "backend" else ScriptedEngine, method, fails)
    resolved = resolve_run("say_yes", plugins, backend="scripted", engine=None if opened == "backend" else "scripted")
    if opened == "backend":
        parts = parts_of(resolved)
        host, opening = parts.host, evaluation.engine_of_backend(parts, None)
    else:
        host, opening = host_of(resolved, workflow_of(resolved)), evaluation.engine_by_name("scripted", resolved)
    measuring = evaluation.evaluate(resolved, host, opening, split="train", task_limit=2, samples=2, ks=(1,))
    assert asyncio.run(measuring)["failed"] == 0
    [note] = caplog.messages
    assert note.startswith(f"{method} of {opened} 'scripted' failed: ")
    assert note.endswith("ValueError: cannot stop")


@pytest.mark.slow
def test_what_was_half_opened_is_closed(
    assembly: Callable[..., Parts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RunError("the server does not start")

    monkeypatch.setattr(Recorded, "opening", staticmethod(fail))
    with pytest.raises(RunError, match="the server does not start"):
        train(assembly(), tmp_path / "run")
    assert Recorded.calls == ["open", "close"]
    assert "the server does not start" in json.loads((tmp_path / "run" / "summary.json").read_text())["error"]


@pytest.mark.slow
def test_opening_has_a_deadline(
    assembly: Callable[..., Parts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorded, "opening", staticmethod(lambda: 300))
    with pytest.raises(StallError, match=r"open\(\) of workflow 'say_yes' did not end within 1 s"):
        train(assembly("training.backend_timeout_seconds=1"), tmp_path / "run")
    assert Recorded.calls == ["open", "close"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raises", "hangs"])
def test_a_workflow_that_does_not_close_changes_nothing_about_the_run(
    assembly: Callable[..., Parts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    noted: list[str] = []

    def fail() -> float:
        if fault == "raises":
            raise ValueError("cannot stop")
        return math.inf

    monkeypatch.setattr(launch, "CLOSING_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(Recorded, "closing", staticmethod(lambda: fail() if fault == "raises" else 300))
    monkeypatch.setattr(Progress, "note", lambda self, text: noted.append(text))
    assert train(assembly(), tmp_path / "run")["status"] == "completed"
    assert any("close() of workflow 'say_yes'" in text for text in noted), noted


@pytest.mark.slow
def test_the_sandbox_of_the_run_file_is_used_and_closed(assembly: Callable[..., Parts], tmp_path: Path) -> None:
    a = assembly("rollout.sandbox=own")
    chosen: Any = type(a.workflow.services.sandbox)
    assert chosen.__name__ == "OwnSandbox"
    train(a, tmp_path / "run")
    assert chosen.closed == 1


def test_a_sandbox_that_does_not_exist_is_an_error_before_anything_is_allocated(
    assembly: Callable[..., Parts],
) -> None:
    with pytest.raises(PluginError, match="no sandbox named 'gvisor'; installed: child, elsewhere, own"):
        assembly("rollout.sandbox=gvisor")


def test_a_sandbox_that_does_not_work_is_an_error_before_anything_is_allocated(
    assembly: Callable[..., Parts],
) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.sandbox = 'elsewhere' does not work on this machine: it needs"):
        assembly("rollout.sandbox=elsewhere")
