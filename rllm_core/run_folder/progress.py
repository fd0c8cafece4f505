"""Progress display: a live view in a terminal, plain lines elsewhere."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm_core.limits.guard import stack_of
from rllm_core.plugins.blame import place_among
from rllm_core.text import counted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from rllm_core.config import RunConfig
    from rllm_core.run_folder.results import Now, ValidationResult
    from rllm_core.types import Episode

logger = logging.getLogger(__name__)

PLAIN_EVERY_SECONDS = 5.0
PLAIN_BETWEEN_STEPS_SECONDS = 60.0
SILENT_SECONDS = 1.0
SHOWN_PROBLEMS = 5
LABEL_WIDTH = len("generation ")
HOLDS = {"pause": "new weights", "memory": "buffer full", "window": "window full", "end": "nothing left to start"}


class Progress:
    """Progress display that shows nothing; base class of the others."""

    def start(self, config: RunConfig, run_dir: Path, first_step: int) -> None:
        """Called when the run starts at ``first_step`` (0 unless it is resumed)."""

    def waiting(self, what: str) -> None:
        """Called before something that may take long, such as loading a model; the next call or `watch` ends it."""

    def watch(self, now: Callable[[], Now]) -> None:
        """Called when generation and training start; ``now`` returns the work in flight, and is thread-safe."""

    def step(self, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
        """Called after each optimizer step."""

    def validating(self, step: int, rollouts: int) -> None:
        """Called when validation starts."""

    def validated(self, result: ValidationResult) -> None:
        """Called when validation is done."""

    def problem(self, episode: Episode) -> None:
        """Called for each failed rollout."""

    def note(self, text: str) -> None:
        """Shows one line."""

    def stop(self) -> None:
        """Called when the run has ended, even after an error."""

    def closing(self, text: str) -> None:
        """Shows one final line, after `stop`."""


EVENTS = tuple(name for name in vars(Progress) if not name.startswith("_"))


class Harmless(Progress):
    """Forwards to a display; if the display fails, logs it and switches it off without affecting the run."""

    def __init__(self, display: Progress) -> None:
        self._display: Progress | None = display
        for event in EVENTS:
            setattr(self, event, functools.partial(self._forward, event))

    def _forward(self, event: str, *arguments: Any) -> None:
        if self._display is None:
            return
        try:
            getattr(self._display, event)(*arguments)
        except Exception as error:  # a closed terminal, or a bug in the display
            failed, self._display = self._display, None
            logger.warning("the progress display failed and is switched off: %s: %s", type(error).__name__, error)
            if event != "stop":
                Harmless(failed).stop()  # restore the terminal


class _Told(Progress):
    """Common base of the visible displays: the clock, and the text of each event."""

    def start(self, config: RunConfig, run_dir: Path, first_step: int) -> None:
        training = config.training
        self._steps = training.steps
        self._first = first_step
        self._is_ahead = training.staleness_threshold > 0 or training.trigger_parameter_sync_step > 1
        self._began: float | None = None
        self._limits = config.costs.budget.model_dump(exclude_none=True)
        self._problems = 0
        self._now: Callable[[], Now] | None = None
        self._awaited = ""
        self._say(
            f"training {config.workflow} on {config.backend} for {counted(self._steps, 'step')} of "
            f"{training.groups_per_step} x {counted(training.rollouts_per_group, 'rollout')}, in {run_dir}"
        )
        if first_step:
            self._say(f"resumed after step {first_step}")

    def waiting(self, what: str) -> None:
        self._awaited, self._since = what, time.monotonic()

    def watch(self, now: Callable[[], Now]) -> None:
        self._now, self._awaited = now, ""

    def validated(self, result: ValidationResult) -> None:
        measured = {"reward": result.reward_mean, "solved": result.solved, "nll per token": result.nll_per_token}
        numbers = [f"{name} {value:.3f}" for name, value in measured.items() if value is not None] or ["reward none"]
        failed = f", {result.failed} failed" if result.failed else ""
        self._say(
            f"validation after step {result.step}: {', '.join(numbers)} ({counted(result.rollouts, 'rollout')}{failed})"
        )

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

    closing = note

    def _left(self, step: int, step_seconds: float) -> str:
        """Estimates the time left from the pace since the first step, excluding loading and validation."""
        if self._began is None:
            self._began = time.monotonic() - step_seconds
        return _clock((time.monotonic() - self._began) / (step - self._first) * (self._steps - step))

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class PlainProgress(_Told):
    """Prints a line every few seconds, for logs, or one per minute during a long step."""

    def __init__(self) -> None:
        self._last = 0.0
        self._spoke_at = 0.0
        self._ended = threading.Event()

    def start(self, config: RunConfig, run_dir: Path, first_step: int) -> None:
        self._doing = f"step {first_step + 1}"
        super().start(config, run_dir, first_step)

    def waiting(self, what: str) -> None:
        super().waiting(what)
        # In a thread: loading may block the event loop.
        threading.Thread(target=self._speak_while_waiting, args=(what,), name="waiting", daemon=True).start()

    def _speak_while_waiting(self, what: str) -> None:
        pause = SILENT_SECONDS
        while not self._ended.wait(pause) and self._awaited == what:
            waited = time.monotonic() - self._since
            try:
                self._say(f"{what} ..." if pause == SILENT_SECONDS else f"{what} for {_clock(waited)}{_now_at()}")
            except OSError:
                return  # stderr is closed, which the main loop will notice too
            pause = PLAIN_BETWEEN_STEPS_SECONDS

    def watch(self, now: Callable[[], Now]) -> None:
        super().watch(now)
        # In a thread: the event loop may be blocked by a batch.
        threading.Thread(target=self._speak_between_steps, args=(now,), name="progress", daemon=True).start()

    def _speak_between_steps(self, now: Callable[[], Now]) -> None:
        while not self._ended.wait(PLAIN_BETWEEN_STEPS_SECONDS):
            if time.monotonic() - self._spoke_at >= PLAIN_BETWEEN_STEPS_SECONDS:
                try:
                    self._say(f"{self._doing} in progress: {_in_flight(now())}")
                except OSError:
                    return  # stderr is closed, which the main loop will notice too

    def validating(self, step: int, rollouts: int) -> None:
        self._doing = f"validation after step {step}"
        self._say(f"validating after step {step}: {counted(rollouts, 'rollout')} ...")

    def validated(self, result: ValidationResult) -> None:
        self._doing = f"step {result.step + 1}"
        super().validated(result)

    def stop(self) -> None:
        self._ended.set()

    def _say(self, text: str) -> None:
        self._spoke_at = time.monotonic()
        super()._say(text)

    def step(self, metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> None:
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
            if self._limits or timings["spent_money"] is not None:
                parts.append(f"spent {_spent(timings, self._limits)}")
            self._say("  ".join([*parts, f"{left} left"]))


class LiveProgress(_Told):
    """Draws a few lines in place: the step, its metrics, and the work in flight."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console

    def start(self, config: RunConfig, run_dir: Path, first_step: int) -> None:
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
        left = self._left(metrics["step"], timings["step_seconds"])
        self._bar.update(self._task, completed=metrics["step"], left=f"{left} left")
        self._metrics, self._timings = metrics, timings

    def validating(self, step: int, rollouts: int) -> None:
        self._validation = f"{counted(rollouts, 'rollout')} after step {step}"

    def validated(self, result: ValidationResult) -> None:
        self._validation = ""
        super().validated(result)

    def stop(self) -> None:
        if hasattr(self, "_live"):
            self._now, self._awaited = None, ""  # nothing is in flight now
            self._live.stop()

    def render(self) -> RenderableType:
        """Renders the current view; called several times per second, from another thread."""
        from rich.console import Group
        from rich.text import Text

        rows = [f"{label:<{LABEL_WIDTH}}{text}" for label, text in self._rows()]
        return Group(self._bar, *(Text(row, no_wrap=True, overflow="ellipsis") for row in rows))

    def _rows(self) -> Iterator[tuple[str, str]]:
        metrics, timings, now = self._metrics, self._timings, self._now
        if self._awaited:
            waited = time.monotonic() - self._since
            where = _now_at() if waited > PLAIN_BETWEEN_STEPS_SECONDS else ""
            yield "waiting", f"{self._awaited} ({_clock(waited)}{where})"
        if self._validation:
            yield "validation", self._validation
        elif metrics:
            yield _outcome(metrics, timings)
        if now is not None:
            moment = now()
            idle = f", idle {timings['generation_idle_share']:.0%}" if self._is_ahead and timings else ""
            hold = f" ({HOLDS[moment.hold]})" if self._is_ahead and moment.hold is not None else ""
            yield "generation", f"{_in_flight(moment)}{idle}{hold}"
        if timings:
            yield "spent", _spent(timings, self._limits)
        if self._is_ahead and metrics:
            yield "training", f"idle {timings['training_idle_share']:.0%}, {_staleness(metrics)}"
            yield "speed-up", _speedup(timings) or "measured once generation has reached its full lead"

    def _say(self, text: str) -> None:
        if self._console is None:  # a signal before the start
            super()._say(text)
        else:
            self._console.print(text, highlight=False, markup=False)


def for_terminal() -> Progress:
    """Returns the live view if standard error is a terminal, otherwise plain lines."""
    return LiveProgress() if sys.stderr.isatty() else PlainProgress()


def _outcome(metrics: Mapping[str, Any], timings: Mapping[str, Any]) -> tuple[str, str]:
    """Formats the start of the step's line: the reward, or the loss if there are no rewards."""
    label, key = ("reward", "reward_mean") if "reward_mean" in metrics else ("loss", "loss")
    value = f"{metrics[key]:.3f}" if key in metrics else "unknown"
    solved = f"  solved {metrics['solved']:.3f}" if "solved" in metrics else ""
    return label, f"{value}{solved}  {timings['tokens_per_second']:,.0f} tokens/s"


def _now_at() -> str:
    """Names the line of plugin or user code that runs in this process, for a wait that may never end."""
    places = (place_among(stack_of(top)) for top in sys._current_frames().values())
    return next((f", now at {place.in_function}" for place in places if place is not None), "")


def _in_flight(now: Now) -> str:
    most = max(now.rollouts, now.max_rollouts)  # a validation may run more rollouts than the limit of training
    scored = f", {now.groups_scored} being scored" if now.groups_scored else ""
    return f"{now.rollouts}/{most} rollouts in {now.groups_in_flight} groups{scored}, {now.groups_waiting} queued"


def _spent(timings: Mapping[str, Any], limits: Mapping[str, float]) -> str:
    """Formats the costs of the run so far, and the limits of its budget."""
    parts = []
    for name in ("tokens", "calls", "money"):
        amount, limit = timings[f"spent_{name}"], limits.get(name)
        if amount is not None:
            form = "{:,.4g}" if name == "money" else "{:,.0f}"
            of = f" of {form.format(limit)}" if limit is not None else ""
            parts.append(f"{form.format(amount)}{of}{'' if name == 'money' else f' {name}'}")
    return ", ".join(parts)


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
