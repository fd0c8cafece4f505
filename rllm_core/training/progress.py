"""What a person sees while training runs: a live display in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllm_core.config import RunConfig
    from rllm_core.training.validation import ValidationResult
    from rllm_core.types import Episode

PLAIN_EVERY_SECONDS = 5.0
SHOWN_PROBLEMS = 5


class Progress:
    """Tells nobody anything; the base of the two that do."""

    def start(self, config: RunConfig, run_dir: Path, first_step: int) -> None:
        """The run begins at ``first_step`` (0 unless it is resumed)."""

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


class _Told(Progress):
    """What both visible forms share: the clock, and the text of each event."""

    def start(self, config: RunConfig, run_dir: Path, first_step: int) -> None:
        self._steps = config.training.steps
        self._first = first_step
        self._is_ahead = config.training.staleness_threshold > 0
        self._began: float | None = None
        self._problems = 0
        self._say(
            f"training {config.workflow} on {config.backend} for {self._steps} steps of "
            f"{config.training.groups_per_step} x {config.training.rollouts_per_group} rollouts, in {run_dir}"
        )
        if first_step:
            self._say(f"resumed after step {first_step}")

    def validated(self, result: ValidationResult) -> None:
        solved = "" if result.solved is None else f", solved {result.solved:.3f}"
        reward = "none" if result.reward_mean is None else f"{result.reward_mean:.3f}"
        failed = f", {result.failed} failed" if result.failed else ""
        self._say(f"validation after step {result.step}: reward {reward}{solved} ({result.rollouts} rollouts{failed})")

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

    def _seconds_left(self, step: int, step_seconds: float) -> float:
        """From the pace so far, which begins with the first step and not with loading and validation."""
        if self._began is None:
            self._began = time.monotonic() - step_seconds
        return (time.monotonic() - self._began) / (step - self._first) * (self._steps - step)

    def _line(self, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> str:
        step = metrics["step"]
        solved = f"  solved {metrics['solved']:.3f}" if "solved" in metrics else ""
        left = _clock(self._seconds_left(step, timings["step_seconds"]))
        return (
            f"step {step}/{self._steps}  reward {metrics['reward_mean']:.3f}{solved}  "
            f"{timings['tokens_per_second']:,.0f} tokens/s  {self._overlap(metrics, timings)}{left} left"
        )

    def _overlap(self, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> str:
        """Where generation runs ahead: how old the step's groups were, and how long training waited for them."""
        if not self._is_ahead:
            return ""
        idle = timings["generation_wait_seconds"] / max(timings["step_seconds"], 1e-9)
        return (
            f"staleness {metrics['staleness_mean']:.1f} (at most {metrics['staleness_max']:.0f})  "
            f"trainer idle {idle:.0%}  "
        )

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class PlainProgress(_Told):
    """A line every few seconds, for logs."""

    def start(self, config: RunConfig, run_dir: Path, first_step: int) -> None:
        """See `Progress`."""
        self._last = 0.0
        super().start(config, run_dir, first_step)

    def step(self, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """See `Progress`."""
        now = time.monotonic()
        if now - self._last >= PLAIN_EVERY_SECONDS or metrics["step"] == self._steps:
            self._last = now
            self._say(self._line(metrics, timings))


class LiveProgress(_Told):
    """A bar with the numbers of the current step, redrawn in place."""

    def start(self, config: RunConfig, run_dir: Path, first_step: int) -> None:
        """See `Progress`."""
        from rich import progress as rich_progress
        from rich.console import Console

        console = Console(stderr=True)
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("{task.fields[numbers]}"),
            console=console,
            refresh_per_second=4,
        )
        super().start(config, run_dir, first_step)
        self._bar.start()
        self._task = self._bar.add_task("step", total=self._steps, completed=first_step, numbers="")

    def step(self, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """See `Progress`."""
        numbers = self._line(metrics, timings).partition("  ")[2]
        self._bar.update(self._task, completed=metrics["step"], numbers=numbers)

    def validating(self, step: int, rollouts: int) -> None:
        """See `Progress`."""
        self._bar.update(self._task, numbers=f"validating on {rollouts} rollouts")

    def validated(self, result: ValidationResult) -> None:
        """See `Progress`."""
        self._bar.update(self._task, numbers="")
        super().validated(result)

    def stop(self) -> None:
        """See `Progress`."""
        if hasattr(self, "_bar"):
            self._bar.stop()

    def _say(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)


def for_terminal() -> Progress:
    """The live display if standard error is a terminal, plain lines otherwise."""
    return LiveProgress() if sys.stderr.isatty() else PlainProgress()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
