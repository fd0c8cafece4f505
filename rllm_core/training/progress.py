"""What a person sees while training runs: a live display in a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from rllm_core.config import RunConfig
    from rllm_core.training.pace import Now
    from rllm_core.training.validation import ValidationResult
    from rllm_core.types import Episode

logger = logging.getLogger(__name__)

PLAIN_EVERY_SECONDS = 5.0
PLAIN_BETWEEN_STEPS_SECONDS = 60.0
SHOWN_PROBLEMS = 5
LABEL_WIDTH = len("generation ")
HOLDS = {"pause": "new weights", "memory": "buffer full", "window": "window full", "end": "nothing left to start"}


class Progress:
    """Tells nobody anything; the base of the two that do."""

    def start(self, config: RunConfig, run_dir: Path, first_step: int) -> None:
        """The run begins at ``first_step`` (0 unless it is resumed)."""

    def watch(self, now: Callable[[], Now]) -> None:
        """Both halves of the loop begin; ``now`` says what is in flight whenever it is called, from any thread."""

    def step(self, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """An optimizer step is done."""

    def validating(self, step: int, rollouts: int) -> None:
        """Validation begins."""

    def validated(self, result: ValidationResult) -> None:
        """Validation is done."""

    def problem(self, episode: Episode) -> None:
        """A rollout failed."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def stop(self) -> None:
        """The run has ended, well or badly."""

    def closing(self, text: str) -> None:
        """A line to end with, after `stop`: what a person is to have seen."""


class Harmless(Progress):
    """Passes everything on to a display until that fails, which is said and does not concern the run.

    Args:
        display: Who is told.
    """

    def __init__(self, display: Progress) -> None:
        self._display: Progress | None = display

    def start(self, config: RunConfig, run_dir: Path, first_step: int) -> None:
        """See `Progress`."""
        self._tell("start", config, run_dir, first_step)

    def watch(self, now: Callable[[], Now]) -> None:
        """See `Progress`."""
        self._tell("watch", now)

    def step(self, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """See `Progress`."""
        self._tell("step", metrics, timings)

    def validating(self, step: int, rollouts: int) -> None:
        """See `Progress`."""
        self._tell("validating", step, rollouts)

    def validated(self, result: ValidationResult) -> None:
        """See `Progress`."""
        self._tell("validated", result)

    def problem(self, episode: Episode) -> None:
        """See `Progress`."""
        self._tell("problem", episode)

    def note(self, text: str) -> None:
        """See `Progress`."""
        self._tell("note", text)

    def stop(self) -> None:
        """See `Progress`."""
        self._tell("stop")

    def closing(self, text: str) -> None:
        """See `Progress`."""
        self._tell("closing", text)

    def _tell(self, method: str, *arguments: Any) -> None:
        if self._display is None:
            return
        try:
            getattr(self._display, method)(*arguments)
        except Exception as error:  # a terminal that is gone, or a bug of the display
            failed, self._display = self._display, None
            logger.warning("the progress display failed and is switched off: %s: %s", type(error).__name__, error)
            if method != "stop":
                Harmless(failed).stop()  # give the terminal back, if it is there


class _Told(Progress):
    """What both visible forms share: the clock, and the text of each event."""

    def start(self, config: RunConfig, run_dir: Path, first_step: int) -> None:
        training = config.training
        self._steps = training.steps
        self._first = first_step
        self._is_ahead = training.staleness_threshold > 0 or training.trigger_parameter_sync_step > 1
        self._began: float | None = None
        self._problems = 0
        self._now: Callable[[], Now] | None = None
        self._say(
            f"training {config.workflow} on {config.backend} for {self._steps} steps of "
            f"{training.groups_per_step} x {training.rollouts_per_group} rollouts, in {run_dir}"
        )
        if first_step:
            self._say(f"resumed after step {first_step}")

    def watch(self, now: Callable[[], Now]) -> None:
        self._now = now

    def validated(self, result: ValidationResult) -> None:
        measured = {"reward": result.reward_mean, "solved": result.solved, "nll per token": result.nll_per_token}
        numbers = [f"{name} {value:.3f}" for name, value in measured.items() if value is not None] or ["reward none"]
        failed = f", {result.failed} failed" if result.failed else ""
        self._say(f"validation after step {result.step}: {', '.join(numbers)} ({result.rollouts} rollouts{failed})")

    def problem(self, episode: Episode) -> None:
        self._problems += 1
        if self._problems <= SHOWN_PROBLEMS:
            self._say(
                f"rollout {episode.rollout_id} of task {episode.task_id} failed "
                f"({episode.termination_reason.value}): {episode.error}"
            )
        if self._problems == SHOWN_PROBLEMS:
            self._say("further failed rollouts are counted in summary.json and listed in events.jsonl")

    def note(self, text: str) -> None:
        self._say(text)

    def closing(self, text: str) -> None:
        self._say(text)

    def _left(self, step: int, step_seconds: float) -> str:
        """From the pace so far, which begins with the first step and not with loading and validation."""
        if self._began is None:
            self._began = time.monotonic() - step_seconds
        return _clock((time.monotonic() - self._began) / (step - self._first) * (self._steps - step))

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class PlainProgress(_Told):
    """A line every few seconds, for logs; where a step takes minutes, one a minute says that it goes on."""

    def __init__(self) -> None:
        self._last = 0.0
        self._spoke_at = 0.0
        self._ended = threading.Event()

    def start(self, config: RunConfig, run_dir: Path, first_step: int) -> None:
        """See `Progress`."""
        self._doing = f"step {first_step + 1}"
        super().start(config, run_dir, first_step)

    def watch(self, now: Callable[[], Now]) -> None:
        """See `Progress`."""
        super().watch(now)
        # A thread: the loop may be busy with a batch, and has better things to do than to look at a clock.
        threading.Thread(target=self._speak_between_steps, args=(now,), name="progress", daemon=True).start()

    def _speak_between_steps(self, now: Callable[[], Now]) -> None:
        while not self._ended.wait(PLAIN_BETWEEN_STEPS_SECONDS):
            if time.monotonic() - self._spoke_at >= PLAIN_BETWEEN_STEPS_SECONDS:
                try:
                    self._say(f"{self._doing} in progress: {_in_flight(now())}")
                except OSError:
                    return  # nobody reads any more, which the loop will find out as well

    def validating(self, step: int, rollouts: int) -> None:
        """See `Progress`."""
        self._doing = f"validation after step {step}"

    def validated(self, result: ValidationResult) -> None:
        """See `Progress`."""
        self._doing = f"step {result.step + 1}"
        super().validated(result)

    def stop(self) -> None:
        """See `Progress`."""
        self._ended.set()

    def _say(self, text: str) -> None:
        self._spoke_at = time.monotonic()
        super()._say(text)

    def step(self, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """See `Progress`."""
        step, left = metrics["step"], self._left(metrics["step"], timings["step_seconds"])
        self._doing = f"step {step + 1}"
        now = time.monotonic()
        if now - self._last >= PLAIN_EVERY_SECONDS or step == self._steps:
            self._last = now
            parts = [f"step {step}/{self._steps}", " ".join(_outcome(metrics, timings))]
            if self._is_ahead:
                if self._now is not None:
                    parts.append(_in_flight(self._now()))
                generation, training = timings["generation_idle_share"], timings["training_idle_share"]
                parts += [f"idle: generation {generation:.0%}, training {training:.0%}", _staleness(metrics)]
                if (speedup := _speedup(timings)) is not None:
                    parts.append(speedup)
            self._say("  ".join([*parts, f"{left} left"]))


class LiveProgress(_Told):
    """A few lines, redrawn in place: the step, its numbers, and what happens right now.

    Args:
        console: Where to draw; standard error if not given.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console

    def start(self, config: RunConfig, run_dir: Path, first_step: int) -> None:
        """See `Progress`."""
        from rich import live
        from rich import progress as rich_progress
        from rich.console import Console

        self._console = self._console or Console(stderr=True)
        self._metrics: Mapping[str, Any] = {}
        self._timings: Mapping[str, Any] = {}
        self._validation = ""
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn(f"{'step':<{LABEL_WIDTH - 1}}"),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("{task.fields[left]}"),
            console=self._console,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=config.training.steps, completed=first_step, left="")
        super().start(config, run_dir, first_step)
        self._live = live.Live(console=self._console, get_renderable=self.render, refresh_per_second=4)
        self._live.start()

    def step(self, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """See `Progress`."""
        left = self._left(metrics["step"], timings["step_seconds"])
        self._bar.update(self._task, completed=metrics["step"], left=f"{left} left")
        self._metrics, self._timings = metrics, timings

    def validating(self, step: int, rollouts: int) -> None:
        """See `Progress`."""
        self._validation = f"{rollouts} rollouts after step {step}"

    def validated(self, result: ValidationResult) -> None:
        """See `Progress`."""
        self._validation = ""
        super().validated(result)

    def stop(self) -> None:
        """See `Progress`."""
        if hasattr(self, "_live"):
            self._now = None  # nothing is in flight any more
            self._live.stop()

    def render(self) -> RenderableType:
        """What is shown at this moment; called several times a second, from a thread of its own."""
        from rich.console import Group
        from rich.text import Text

        rows = [f"{label:<{LABEL_WIDTH}}{text}" for label, text in self._rows()]
        return Group(self._bar, *(Text(row, no_wrap=True, overflow="ellipsis") for row in rows))

    def _rows(self) -> Iterator[tuple[str, str]]:
        metrics, timings, now = self._metrics, self._timings, self._now
        if self._validation:
            yield "validation", self._validation
        elif metrics:
            yield _outcome(metrics, timings)
        if now is not None:
            moment = now()
            idle = f", idle {timings['generation_idle_share']:.0%}" if self._is_ahead and timings else ""
            hold = f" ({HOLDS[moment.hold]})" if self._is_ahead and moment.hold is not None else ""
            yield "generation", f"{_in_flight(moment)}{idle}{hold}"
        if self._is_ahead and metrics:
            yield "training", f"idle {timings['training_idle_share']:.0%}, {_staleness(metrics)}"
            yield "speed-up", _speedup(timings) or "measured once generation has reached its full lead"

    def _say(self, text: str) -> None:
        assert self._console is not None
        self._console.print(text, highlight=False, markup=False)


def for_terminal() -> Progress:
    """The live display if standard error is a terminal, plain lines otherwise."""
    return LiveProgress() if sys.stderr.isatty() else PlainProgress()


def _outcome(metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> tuple[str, str]:
    """What the step's line begins with: the reward, or the loss of runs that have none."""
    label, key = ("reward", "reward_mean") if "reward_mean" in metrics else ("loss", "loss")
    value = f"{metrics[key]:.3f}" if key in metrics else "unknown"
    solved = f"  solved {metrics['solved']:.3f}" if "solved" in metrics else ""
    return label, f"{value}{solved}  {timings['tokens_per_second']:,.0f} tokens/s"


def _in_flight(now: Now) -> str:
    most = max(now.rollouts, now.max_rollouts)  # a validation may run more than training is allowed to
    return f"{now.rollouts}/{most} rollouts in {now.groups_in_flight} groups, {now.groups_waiting} queued"


def _staleness(metrics: Mapping[str, Any]) -> str:
    return f"staleness mean {metrics['staleness_mean']:.1f}, max {metrics['staleness_max']:.0f}"


def _speedup(timings: Mapping[str, Any]) -> str | None:
    if timings["speedup_over_synchronous"] is None:
        return None
    return f"{timings['speedup_over_synchronous']:.1f}x synchronous speed (upper bound {timings['speedup_bound']:.1f}x)"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
