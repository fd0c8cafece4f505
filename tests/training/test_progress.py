"""Tests the live view of a run: current activity, staleness, bottleneck and speed gain."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rllm_core.assembly.parts import Parts
from rllm_core.engine import EngineError
from rllm_core.providers import resolve
from rllm_core.run_folder import progress as progress_module
from rllm_core.run_folder.progress import LiveProgress, PlainProgress, Progress
from rllm_core.run_folder.results import Now

AHEAD = ("training.staleness_threshold=1", "training.partial_rollout=true")


class Watched(LiveProgress):
    """Display in a virtual terminal of 80 columns; records the screen after each event."""

    def __init__(self, columns: int = 80) -> None:
        self.columns = columns
        self.screen = io.StringIO()
        super().__init__(Console(width=columns, file=self.screen, force_terminal=True))
        self.seen: dict[str, list[str]] = {}

    def look(self) -> list[str]:
        file = io.StringIO()
        Console(width=self.columns, file=file).print(self.render())
        return [line.rstrip() for line in file.getvalue().splitlines()]

    def watch(self, now: Callable[[], Now]) -> None:
        super().watch(now)
        self.seen["before the first step"] = self.look()

    def step(self, metrics: Any, timings: Any) -> None:
        super().step(metrics, timings)
        self.seen[f"step {metrics['step']}"] = self.look()

    def validating(self, step: int, rollouts: int) -> None:
        super().validating(step, rollouts)
        self.seen[f"validation {step}"] = self.look()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), AHEAD])
def test_plain_lines_of_an_asynchronous_run_say_how_stale_and_how_idle(
    run_scripted: Any, capsys: pytest.CaptureFixture[str], settings: tuple[str, ...]
) -> None:
    run = run_scripted(*settings, progress=PlainProgress())
    assert run.error is None
    [last] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step 6/6")]
    metrics, timings = run.lines("metrics")[-1], run.lines("timings")[-1]
    said = [
        f"staleness mean {metrics['staleness_mean']:.1f}, max {metrics['staleness_max']:.0f}",
        f"idle: generation {timings['generation_idle_share']:.0%}, training {timings['training_idle_share']:.0%}",
        "0/32 rollouts in 0 groups, 0 queued",
        f"{timings['speedup_over_synchronous']:.1f}x synchronous speed (upper bound {timings['speedup_bound']:.1f}x)",
    ]
    assert [text in last for text in said] == [bool(settings)] * 4


@pytest.mark.slow
def test_plain_lines_say_that_a_long_step_goes_on(
    run_scripted: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "PLAIN_BETWEEN_STEPS_SECONDS", 0.02)

    def takes_long(assembly: Parts) -> None:
        original = assembly.backend.update_policy

        async def update_policy(step: Any) -> Any:
            said, line = "", "step 3 in progress: 0/16 rollouts in 0 groups, 0 queued\n"
            async with asyncio.timeout(60):
                while step.step == 3 and line not in said:
                    await asyncio.sleep(0.001)
                    said += capsys.readouterr().err
            return await original(step)

        assembly.backend.update_policy = update_policy  # type: ignore[method-assign]

    run = run_scripted(prepare=takes_long, progress=PlainProgress())
    assert run.error is None
    for thread in threading.enumerate():
        if thread.name == "progress":
            thread.join(timeout=60)
            assert not thread.is_alive(), "it ends with the run"


def said_by(display: Progress, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what a display shows now, or has printed since the last call."""
    return " ".join(display.look()) if isinstance(display, Watched) else capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("is_live", [False, True])
def test_a_wait_names_the_line_of_the_users_code_that_runs(
    run_scripted: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_live: bool,
) -> None:
    monkeypatch.setattr(progress_module, "PLAIN_BETWEEN_STEPS_SECONDS", 0.02)
    monkeypatch.setattr(progress_module, "SILENT_SECONDS", 0.01)
    path = tmp_path / "waits.py"
    path.write_text("def step(ended):\n    while not ended.wait(0.01):\n        pass\n")
    step, display, ended = resolve(f"{path}:step"), Watched(300) if is_live else PlainProgress(), threading.Event()

    def takes_long(assembly: Parts) -> None:
        original = assembly.backend.init_rollout_engine

        async def init_rollout_engine(parser: Any) -> Any:
            stepping, said = asyncio.ensure_future(asyncio.to_thread(step, ended)), ""
            try:
                async with asyncio.timeout(60):
                    while f"now at {path}:2 in step(" not in said:
                        await asyncio.sleep(0.001)
                        said += said_by(display, capsys)
            finally:
                ended.set()
                await stepping
            return await original(parser)

        assembly.backend.init_rollout_engine = init_rollout_engine  # type: ignore[method-assign]

    assert run_scripted(prepare=takes_long, progress=display).error is None


@pytest.mark.slow
@pytest.mark.parametrize("is_live", [False, True])
def test_a_scorer_that_takes_long_is_named_and_not_the_rollouts(
    run_scripted: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_live: bool,
) -> None:
    monkeypatch.setattr(progress_module, "PLAIN_BETWEEN_STEPS_SECONDS", 0.02)
    path = tmp_path / "scorer.py"
    path.write_text(
        "from rllm_core.algorithms.group_scorer import GroupScorer\nwaits = None\n\nclass Late(GroupScorer):\n"
        "    async def score(self, group, services):\n        await type(self).waits()\n"
        "        return {e.rollout_id: e.trajectories[0].total_reward for e in group.episodes}\n"
    )
    display = Watched() if is_live else PlainProgress()

    def takes_long(assembly: Parts) -> None:
        async def waits() -> None:
            said = ""
            async with asyncio.timeout(60):
                while not re.search(r"0/16 rollouts in \d+ groups, [1-9]\d* being scored, ", said):
                    await asyncio.sleep(0.001)
                    said += said_by(display, capsys)

        type(assembly.scorer).waits = staticmethod(waits)  # type: ignore[union-attr]

    run = run_scripted(f"algorithm.group_scorer={path}", prepare=takes_long, progress=display)
    assert run.error is None


@pytest.mark.slow
def test_plain_lines_say_what_takes_long_before_the_first_step(
    run_scripted: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(progress_module, "PLAIN_BETWEEN_STEPS_SECONDS", 0.02)

    def takes_long(assembly: Parts) -> None:
        original = assembly.backend.init_rollout_engine

        async def init_rollout_engine(parser: Any) -> Any:
            said = ""
            async with asyncio.timeout(60):
                while "starting backend 'scripted' for 0:00\n" not in said:
                    await asyncio.sleep(0.001)
                    said += capsys.readouterr().err
            assert "starting backend 'scripted' ...\n" in said
            return await original(parser)

        assembly.backend.init_rollout_engine = init_rollout_engine  # type: ignore[method-assign]

    run = run_scripted(prepare=takes_long, progress=PlainProgress())
    assert run.error is None
    for thread in threading.enumerate():
        if thread.name == "waiting":
            thread.join(timeout=60)
            assert not thread.is_alive(), "it ends with what is waited for"


@pytest.mark.slow
def test_the_live_view_shows_what_takes_long_before_the_first_step(run_scripted: Any) -> None:
    progress = Watched()
    seen: list[list[str]] = []

    def look(assembly: Parts) -> None:
        original = assembly.backend.init_rollout_engine

        async def init_rollout_engine(parser: Any) -> Any:
            seen.append(progress.look())
            return await original(parser)

        assembly.backend.init_rollout_engine = init_rollout_engine  # type: ignore[method-assign]

    assert run_scripted(prepare=look, progress=progress).error is None
    assert seen[0][1].startswith("waiting    starting backend 'scripted' (0:0")
    assert not any(line.startswith("waiting") for line in progress.seen["before the first step"])


@pytest.mark.slow
def test_the_live_view_of_an_asynchronous_run(run_scripted: Any) -> None:
    progress = Watched()
    run = run_scripted(*AHEAD, progress=progress)
    assert run.error is None
    assert set(progress.seen) == {
        "before the first step",
        "validation 0",
        "validation 6",
        *(f"step {n}" for n in range(1, 7)),
    }
    for shown in progress.seen.values():
        assert len(shown) <= 6
        assert all(len(line) <= 80 for line in shown)
    assert progress.seen["before the first step"][0].endswith("0/6")
    metrics, timings = run.lines("metrics"), run.lines("timings")
    bar, reward, generation, spent, training, speedup = progress.seen["step 4"]
    assert bar.startswith("step       ━")
    assert "4/6" in bar
    assert bar.endswith(" left")
    assert reward.startswith(f"reward     {metrics[3]['reward_mean']:.3f}  solved ")
    assert f", idle {timings[3]['generation_idle_share']:.0%}" in generation
    assert spent == f"spent      {timings[3]['spent_tokens']:,} tokens, {timings[3]['spent_calls']:,} calls"
    stale = f"staleness mean {metrics[3]['staleness_mean']:.1f}, max {metrics[3]['staleness_max']:.0f}"
    assert training == f"training   idle {timings[3]['training_idle_share']:.0%}, {stale}"
    assert speedup.startswith("speed-up   ")
    assert speedup.endswith("x)")
    assert progress.seen["step 1"][-1].startswith("speed-up   measured once")
    assert progress.seen["validation 6"][1] == "validation 10 rollouts after step 6"
    assert "validation after step 6: reward" in progress.screen.getvalue()


@pytest.mark.slow
def test_the_live_view_of_a_synchronous_run_is_short(run_scripted: Any) -> None:
    progress = Watched()
    assert run_scripted(progress=progress).error is None
    assert [line.split()[0] for line in progress.seen["step 3"]] == ["step", "reward", "generation", "spent"]


@pytest.mark.slow
def test_what_is_in_flight_changes_while_a_step_is_trained(run_scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    progress, shown = Watched(), []

    def watches(assembly: Parts) -> None:
        original = assembly.backend.update_policy
        monkeypatch.setattr(type(assembly.backend).script, "latency_seconds", lambda generator: 0.05)

        async def update_policy(step: Any) -> Any:
            while step.step == 1 and not (shown and shown[-1].endswith("4 queued (window full)")):
                shown.append(progress.look()[1])
                await asyncio.sleep(0.001)
            return await original(step)

        assembly.backend.update_policy = update_policy  # type: ignore[method-assign]

    run = run_scripted(*AHEAD, "rollout.max_concurrent_rollouts=16", prepare=watches, progress=progress)
    assert run.error is None
    assert shown[0] == "generation 16/16 rollouts in 4 groups, 0 queued (window full)"
    assert shown[-1] == "generation 0/16 rollouts in 0 groups, 4 queued (window full)"


@pytest.mark.slow
def test_a_resumed_run_shows_the_whole_of_it(run_scripted: Any) -> None:
    def broken(assembly: Parts) -> None:
        original = assembly.backend.update_policy

        async def update_policy(step: Any) -> Any:
            if step.step == 4:
                raise OSError("the device is gone")
            return await original(step)

        assembly.backend.update_policy = update_policy  # type: ignore[method-assign]

    settings = (*AHEAD, "training.checkpoint_every_steps=2")
    assert isinstance(run_scripted(*settings, prepare=broken).error, OSError)
    progress = Watched()
    assert run_scripted(*settings, resume=True, progress=progress).error is None
    assert "2/6" in progress.seen["before the first step"][0]
    assert "3/6" in progress.seen["step 3"][0]
    assert progress.seen["step 3"][-1].startswith("speed-up   measured once"), "the pipeline is empty again"


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80])
def test_many_rollouts_fit_into_a_narrow_terminal(run_scripted: Any, columns: int) -> None:
    class Crowded(Watched):
        def watch(self, now: Callable[[], Now]) -> None:
            super().watch(lambda: Now(10_000, 10_000, 2_500, 1_000, "memory"))

    progress = Crowded(columns)
    assert run_scripted(*AHEAD, progress=progress).error is None
    shown = progress.seen["step 5"]
    assert len(shown) == 6
    assert all(len(line) <= columns for line in shown)
    assert shown[2].startswith("generation 10000/10000 rollouts")


class Broken(Progress):
    """Display that fails at one event and records whether the terminal was restored."""

    def __init__(self, method: str) -> None:
        self.stopped = False

        def fail(*arguments: Any) -> None:
            raise BrokenPipeError("nobody reads")

        setattr(self, method, fail)

    def stop(self) -> None:
        self.stopped = True


@pytest.mark.slow
@pytest.mark.parametrize("method", ["start", "watch", "step", "validating", "validated", "problem", "note", "stop"])
def test_a_display_that_fails_does_not_stop_a_run(
    run_scripted: Any, method: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tells_everything(assembly: Parts) -> None:
        def failure(number: int) -> Exception | None:
            return EngineError("no") if number == 20 else None

        async def shutdown() -> None:
            raise OSError("the device is gone")

        monkeypatch.setattr(type(assembly.backend).script, "failure", failure)

        assembly.backend.shutdown = shutdown  # type: ignore[method-assign]

    display = Broken(method)
    with caplog.at_level(logging.WARNING):
        run = run_scripted(progress=display, prepare=tells_everything)
    assert run.error is None
    assert run.summary["status"] == "completed"
    said = [record.getMessage() for record in caplog.records if "display" in record.getMessage()]
    assert said == ["the progress display failed and is switched off: BrokenPipeError: nobody reads"]
    assert display.stopped == (method != "stop")
