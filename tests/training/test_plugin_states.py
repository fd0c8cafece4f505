"""Tests plugin states in checkpoints: saved per plugin, restored on resume, protected from faulty plugins."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rllm_devkit.scripted_plugin
from rllm_core import hookimpl
from rllm_core.assembly.parts import Parts
from rllm_core.observers import Observers
from rllm_core.plugins import PluginManager
from rllm_core.run_folder import checkpoint
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_viewer.verify import verify

EVERY_TWO = "training.checkpoint_every_steps=2"


class Diary:
    """Observer that records steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.heard: list[str] = []

    @hookimpl
    def on_train_start(self) -> None:
        self.heard.append("on_train_start")

    @hookimpl
    def on_batch_end(self, step: int) -> None:
        self.steps.append(step)

    @hookimpl
    def save_plugin_state(self, state: Any) -> dict[str, Any] | None:
        assert state.step == self.steps[-1], "asked after the step, and before the next one"
        return {"steps": self.steps}

    @hookimpl
    def load_plugin_state(self, saved: dict[str, Any]) -> None:
        self.heard.append("load_plugin_state")
        self.steps = saved["steps"]


class Notes(Progress):
    """Display that records its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Run:
    """One run folder, launched several times with different plugins."""

    def __init__(self, plugins: PluginManager, folder: Path, run_scripted: Callable[..., Any]) -> None:
        self.plugins, self.folder, self._run = plugins, folder, run_scripted

    def start(self, observers: object | None = None, *, fails_at_step: int | None = None, resume: bool = False) -> Any:
        # One plugin of that name at a time, as in separate processes.
        fresh = PluginManager.from_environment(no_plugins=True)
        fresh.register(rllm_devkit.scripted_plugin, "testing")
        self.plugins.__dict__.update(fresh.__dict__)

        def breaks(assembly: Parts) -> None:
            original = assembly.backend.update_policy

            async def update_policy(step: Any) -> Any:
                if step.step == fails_at_step:
                    raise OSError("the device is gone")
                return await original(step)

            assembly.backend.update_policy = update_policy  # type: ignore[method-assign]

        said = Notes()
        run = self._run(EVERY_TWO, "training.keep_checkpoints=9", observers=observers, prepare=breaks, resume=resume,
                        progress=said, path=self.folder)  # fmt: skip
        assert isinstance(run.error, OSError) if fails_at_step else run.error is None
        assert verify(self.folder).problems == []
        run.notes = said.notes
        return run

    def states(self) -> dict[int, Any]:
        """Returns ``plugins`` of every manifest, by step."""
        manifests = [checkpoint.read(folder) for folder in checkpoint.complete(self.folder / "checkpoints")]
        return {manifest["step"]: manifest["plugins"] for manifest in manifests}


@pytest.fixture
def run(plugins: PluginManager, tmp_path: Path, run_scripted: Callable[..., Any]) -> Run:
    return Run(plugins, tmp_path / "run", run_scripted)


@pytest.mark.slow
def test_a_resumed_plugin_goes_on_where_the_checkpoint_left_it(run: Run) -> None:
    first, second = Diary(), Diary()
    run.start(first, fails_at_step=4)
    assert first.steps == [1, 2, 3], "one more than the checkpoint holds"
    assert run.states() == {2: {"observer": {"steps": [1, 2]}}}
    resumed = run.start(second, resume=True)
    assert second.heard == ["load_plugin_state", "on_train_start"]
    assert second.steps == [1, 2, 3, 4, 5, 6]
    assert run.states()[6] == {"observer": {"steps": [1, 2, 3, 4, 5, 6]}}
    assert resumed.summary["observer_failures"] == {}
    assert resumed.notes == []


@pytest.mark.slow
def test_a_checkpoint_of_a_version_without_plugin_states_is_resumed(run: Run) -> None:
    run.start(fails_at_step=4)
    path = run.folder / "checkpoints/step-000002/manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["plugins"]
    path.write_text(json.dumps(manifest))
    diary = Diary()
    resumed = run.start(diary, resume=True)
    assert diary.heard == ["on_train_start"]
    assert resumed.notes == ["step-000002 has no saved state of plugin 'observer', which starts without it"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([1], "ValueError: save_plugin_state() returned [1]; return a dict with string keys"),
        ({"level": float("nan")}, "returned a value that is not JSON: Out of range float values"),
        ({"level": {1, 2}}, "returned a value that is not JSON: Object of type set is not JSON serializable"),
        ({3: "level"}, "return a dict with string keys"),
        ({"levels": (1, 2)}, "JSON values, without tuples"),
        (RuntimeError("lost it"), "RuntimeError: lost it"),
    ],
)
def test_a_state_that_cannot_be_saved_costs_its_plugin_and_nobody_else(
    run: Run, caplog: pytest.LogCaptureFixture, answer: object, said: str
) -> None:
    class Broken(Diary):
        @hookimpl
        def save_plugin_state(self) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

    with caplog.at_level(logging.WARNING):
        broken = run.start(Broken(), fails_at_step=5)
    assert run.states() == {2: {}, 4: {}}
    assert broken.summary["observer_failures"] == {"observer": 2}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, "each lost state is said"
    assert all(m.startswith("save_plugin_state failed: plugin 'observer' (") and said in m for m in messages)
    resumed = run.start(Diary(), resume=True)
    assert resumed.notes == ["step-000004 has no saved state of plugin 'observer', which starts without it"]


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_a_plugin_that_takes_too_long_to_save_is_not_asked_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    monkeypatch.setattr(launch, "Observers", lambda plugins: Observers(plugins, deadline_seconds=0.05))
    asked = []
    ended = threading.Event()

    class Endless:
        def __await__(self) -> Any:  # on a busy machine, the time is over before it is awaited
            return asyncio.sleep(3600).__await__()

    class Slow:
        @hookimpl
        def save_plugin_state(self) -> Any:
            asked.append(1)
            if is_async:
                return Endless()
            ended.wait(600)
            return {}

    try:
        slow = run.start(Slow())
    finally:
        ended.set()
    assert len(asked) == 1
    assert run.states() == {2: {}, 4: {}, 6: {}}
    assert slow.summary["observer_failures"] == {"observer": 1}


@pytest.mark.slow
def test_the_state_of_a_missing_plugin_is_carried_on_until_it_is_back(run: Run) -> None:
    run.start(Diary(), fails_at_step=3)
    without = run.start(fails_at_step=5, resume=True)
    assert without.notes == [
        "changed since the previous launch: observer -> not installed",
        "step-000002 has saved state of plugin 'observer', which is missing, disabled or has no load_plugin_state; "
        "later checkpoints keep it",
    ]
    kept = {"observer": {"steps": [1, 2]}}
    assert run.states() == {2: kept, 4: kept}
    back = Diary()
    run.start(back, resume=True)
    assert back.heard == ["load_plugin_state", "on_train_start"]
    assert run.states()[6] == {"observer": {"steps": [1, 2, 5, 6]}}


@pytest.mark.slow
def test_a_state_that_its_plugin_does_not_take_is_carried_on(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    class Refuses:
        @hookimpl
        def load_plugin_state(self, saved: dict[str, Any]) -> None:
            saved.clear()
            raise ValueError("not one of mine")

    run.start(Diary(), fails_at_step=3)
    with caplog.at_level(logging.WARNING):
        resumed = run.start(Refuses(), resume=True)
    assert re.search(r"load_plugin_state failed: plugin 'observer' .*\.py:\d+: ValueError: not one of", caplog.text)
    assert resumed.summary["observer_failures"] == {"observer": 1}
    assert resumed.notes == [
        "step-000002 has saved state of plugin 'observer', which did not load it; later checkpoints keep it"
    ]
    assert run.states()[6] == {"observer": {"steps": [1, 2]}}, "whatever it did to what it was given"


@pytest.mark.slow
def test_a_plugin_with_two_states_has_failed(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    class Twice(Diary):
        @hookimpl(specname="save_plugin_state")
        def another(self) -> dict[str, Any]:
            return {"another": 1}

    with caplog.at_level(logging.WARNING):
        twice = run.start(Twice())
    assert run.states() == {2: {}, 4: {}, 6: {}}
    assert twice.summary["observer_failures"] == {"observer": 3}
    assert "implemented 2 times, but a checkpoint holds one state" in caplog.text


@pytest.mark.slow
def test_what_a_plugin_returned_is_saved_as_it_was_then(run: Run) -> None:
    """A plugin may return its live object and keep changing it while the checkpoint is being written."""
    state: dict[str, Any] = {"step": 0}

    class Shares:
        @hookimpl
        def on_batch_end(self, step: int) -> None:
            state["step"] = step

        @hookimpl
        def save_plugin_state(self) -> dict[str, Any]:
            return state

        @hookimpl
        def on_checkpoint_saved(self) -> None:
            state["step"] = -1

    run.start(Shares())
    assert run.states() == {step: {"observer": {"step": step}} for step in (2, 4, 6)}


@pytest.mark.slow
def test_no_plugin_is_behind_what_an_asynchronous_checkpoint_holds(run: Run, run_scripted: Callable[..., Any]) -> None:
    """Complete groups in the checkpoint do not run again, so a plugin that counts rollouts must have seen theirs."""
    heard: list[str] = []

    class Counts:
        @hookimpl
        def on_episode_finished(self, episode: Any) -> None:
            if not episode.is_validation:
                heard.append(episode.rollout_id)

        @hookimpl
        def save_plugin_state(self) -> dict[str, Any]:
            return {"rollouts": heard}

    def groups_wait_at_step_two(assembly: Parts) -> None:
        original = assembly.backend.update_policy

        async def update_policy(step: Any) -> Any:
            while step.step == 2 and len(heard) < 4 * 16:  # two steps ahead: all that the staleness allows
                await asyncio.sleep(0.001)
            return await original(step)

        assembly.backend.update_policy = update_policy  # type: ignore[method-assign]

    ahead = ("training.staleness_threshold=2", "training.partial_rollout=true", "training.keep_checkpoints=9")
    result = run_scripted(EVERY_TWO, *ahead, observers=Counts(), prepare=groups_wait_at_step_two, path=run.folder)
    assert result.error is None
    held = 0
    for step, states in run.states().items():
        lines = (run.folder / f"checkpoints/step-{step:06d}/buffer.jsonl").read_text().splitlines()
        waiting = {episode["rollout_id"] for line in lines for episode in json.loads(line)["episodes"]}
        assert waiting <= set(states["observer"]["rollouts"])
        held += len(waiting)
    assert held > 0
