"""The offline checker: replays a run's ``events.jsonl`` and proves that its books balance.

What is proven, event by event: groups are dispatched in the order of the task stream, none twice unless it was given
up before; a rollout starts and ends once per attempt; a group is trained at most once, and only after all of its
rollouts ended; the lead of generation stays within the window, and with ``staleness = "strict"`` every trained group
within its age; optimizer steps follow each other and hold ``groups_per_step`` groups; weight versions only grow. At the
end, the journal's books are those of ``summary.json``, ``metrics.jsonl`` has a line per step, and every checkpoint
matches its manifest.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllm_core.config import TrainingConfig
from rllm_core.errors import ConfigError, RunError
from rllm_core.training import checkpoint
from rllm_core.training.books import ACCOUNTS

MAX_PROBLEMS = 100


@dataclass
class Verification:
    """What a check found.

    Attributes:
        problems: What does not hold, with the line of ``events.jsonl`` where there is one; at most 100.
        books: Rollouts by account, then reason, as the journal tells them.
        steps: Optimizer steps.
        planned_steps: Those that were planned.
        weight_version: The last one.
        incarnations: Starts of the run.
        max_lead: Most groups that were outstanding or consumed within a window.
        max_staleness: Greatest difference between the version live when a group was consumed and its oldest one.
        events: Lines read.
    """

    problems: list[str] = field(default_factory=list)
    books: dict[str, dict[str, int]] = field(default_factory=dict)
    steps: int = 0
    planned_steps: int = 0
    weight_version: int = 0
    incarnations: int = 0
    max_lead: int = 0
    max_staleness: int = 0
    events: int = 0

    @property
    def holds(self) -> bool:
        """Whether nothing was found."""
        return not self.problems


def verify(run_dir: Path) -> Verification:
    """Check a run folder.

    Raises:
        ConfigError: If it is none.
    """
    try:
        tables = tomllib.loads((run_dir / "run.toml").read_text(encoding="utf-8"))
        training = TrainingConfig.model_validate(tables.get("training", {}))
    except OSError as error:
        raise ConfigError(f"{run_dir} is not a run folder: {error.strerror} (run.toml)") from error
    except ValueError as error:
        raise ConfigError(f"{run_dir / 'run.toml'} cannot be read: {error}") from error
    replay = _Replay(training)
    journal = run_dir / "events.jsonl"
    if not journal.is_file():
        raise ConfigError(f"{run_dir} has no events.jsonl: nothing was ever started in it")
    with journal.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n"):  # the last line of a run that was killed may be cut off
                replay.line(number, line)
    result = replay.result()
    _check_metrics(run_dir, result)
    _check_summary(run_dir, result, outstanding=len(replay.groups))
    _check_checkpoints(run_dir, result)
    return result


@dataclass
class _Group:
    rollouts: int
    ended: set[int] = field(default_factory=set)
    state: str = "dispatched"
    weight_version: int = 0
    left_out: int = 0
    filtered: str | None = None


class _Replay:
    """The run's state, as the events tell it."""

    def __init__(self, training: TrainingConfig) -> None:
        self.training = training
        self.found = Verification(planned_steps=training.steps)
        self.groups: dict[int, _Group] = {}  # dispatched and neither trained nor given up
        self._again: set[int] = set()  # given up, to be dispatched once more
        self._next_ordinal = 0
        self._running: dict[str, tuple[int, int]] = {}
        self._started: set[str] = set()
        self._consumed_in_window = 0
        self._books: dict[str, Counter[str]] = {account: Counter() for account in ACCOUNTS}
        self._number = 0
        self._max_age = math.ceil(training.staleness_threshold) if training.staleness == "strict" else None
        self._on: dict[str, Callable[[dict[str, Any]], None]] = {
            "begin": self._begin,
            "dispatch": self._dispatch,
            "skip": self._skip,
            "start": self._start,
            "finish": self._finish,
            "enqueue": self._enqueue,
            "filter": self._filter,
            "consume": self._consume,
            "step": self._step,
            "sync": self._sync,
            "return": self._return,
            "cancel": self._cancel,
        }

    def line(self, number: int, line: bytes) -> None:
        """Replay one line."""
        self._number = number
        self.found.events += 1
        try:
            event = json.loads(line)
            replay = self._on.get(event["event"])
            if replay is not None:
                replay(event)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self._problem(f"cannot be read as an event ({type(error).__name__}: {error})")

    def result(self) -> Verification:
        """What was found, after the last line."""
        self.found.books = {account: dict(sorted(reasons.items())) for account, reasons in self._books.items()}
        return self.found

    def _problem(self, what: str) -> None:
        if len(self.found.problems) < MAX_PROBLEMS:
            self.found.problems.append(f"events.jsonl line {self._number}: {what}")

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            self._problem(what)

    def _begin(self, event: dict[str, Any]) -> None:
        self._require(event["incarnation"] >= self.found.incarnations, "incarnations do not grow")
        self._require(event["step"] == self.found.steps, f"a start goes on from step {event['step']}")
        self.found.incarnations = event["incarnation"] + 1
        kept = set(event["restored"])
        self._require(kept <= self.groups.keys(), f"groups {sorted(kept - self.groups.keys())} come from nowhere")
        self._give_up([ordinal for ordinal in self.groups if ordinal not in kept], "restart")
        for ordinal in kept & self.groups.keys():
            state = self.groups[ordinal].state
            self._require(state == "enqueued", f"group {ordinal} is restored as complete, and was {state}")
        self._running.clear()

    def _skip(self, event: dict[str, Any]) -> None:
        ordinal = event["group"]
        if ordinal in self._again:
            self._again.discard(ordinal)
        else:
            self._require(ordinal == self._next_ordinal, f"group {ordinal} is dispatched, {self._next_ordinal} is due")
            self._next_ordinal = max(self._next_ordinal, ordinal + 1)

    def _dispatch(self, event: dict[str, Any]) -> None:
        self._skip(event)
        ordinal = event["group"]
        self._require(ordinal not in self.groups, f"group {ordinal} is dispatched twice")
        self._require(event["rollouts"] == self.training.rollouts_per_group, f"group {ordinal} has another size")
        self.groups[ordinal] = _Group(event["rollouts"])
        outstanding = sum(group.state in ("dispatched", "enqueued") for group in self.groups.values())
        lead = outstanding + self._consumed_in_window
        self.found.max_lead = max(self.found.max_lead, lead)
        self._require(lead <= self.training.window_quota, f"{lead} groups ahead, {self.training.window_quota} allowed")

    def _start(self, event: dict[str, Any]) -> None:
        rollout, ordinal = event["rollout"], event["group"]
        self._require(rollout not in self._started, f"rollout {rollout} starts twice")
        self._require(ordinal in self.groups, f"rollout {rollout} starts in group {ordinal}, which is not in flight")
        self._started.add(rollout)
        self._running[rollout] = (ordinal, event["index"])

    def _finish(self, event: dict[str, Any]) -> None:
        rollout = event["rollout"]
        if rollout not in self._running:
            self._problem(f"rollout {rollout} ends without running")
            return
        ordinal, index = self._running.pop(rollout)
        if ordinal in self.groups:
            self.groups[ordinal].ended.add(index)

    def _enqueue(self, event: dict[str, Any]) -> None:
        group = self._expect(event["group"], "dispatched", "enqueued")
        if group is not None:
            ended = len(group.ended)
            self._require(ended == group.rollouts, f"group {event['group']} is complete with {ended} ended rollouts")
            group.weight_version = event["weight_version"]
            group.left_out = event["left_out"]
            group.filtered = event.get("filtered")  # earlier versions wrote none

    def _filter(self, event: dict[str, Any]) -> None:
        group = self._expect(event["group"], "dispatched", "filtered")
        if group is not None:
            failed = Counter(event["failed"])
            self._books["failed"].update(failed)
            if group.rollouts > failed.total():
                self._books["filtered"][event["reason"]] += group.rollouts - failed.total()
            del self.groups[event["group"]]

    def _consume(self, event: dict[str, Any]) -> None:
        for ordinal in event["groups"]:
            group = self._expect(ordinal, "enqueued", "consumed")
            if group is None:
                continue
            self._consumed_in_window += 1
            age = event["weight_version"] - group.weight_version
            self.found.max_staleness = max(self.found.max_staleness, age)
            self._require(age >= 0, f"group {ordinal} was sampled by a version that is not live yet")
            if self._max_age is not None:
                self._require(age <= self._max_age, f"group {ordinal} is {age} versions old, {self._max_age} allowed")

    def _step(self, event: dict[str, Any]) -> None:
        self._require(event["step"] == self.found.steps + 1, f"step {event['step']} follows step {self.found.steps}")
        self.found.steps = event["step"]
        trained, expected = len(event["groups"]), self.training.groups_per_step
        self._require(trained == expected, f"step {event['step']} trained {trained} groups, {expected} were planned")
        for ordinal in event["groups"]:
            group = self._expect(ordinal, "consumed", "trained")
            if group is None:
                continue
            if group.filtered is not None:
                self._books["filtered"][group.filtered] += group.rollouts
            else:
                self._books["trained"]["trained"] += group.rollouts - group.left_out
                if group.left_out:
                    self._books["filtered"]["termination_reason"] += group.left_out
            del self.groups[ordinal]

    def _sync(self, event: dict[str, Any]) -> None:
        version, before = event["version"], self.found.weight_version
        allowed = (before + 1,) if event["reason"] == "step" else (before, before + 1)
        self._require(version in allowed, f"weight version {version} follows {before}")
        self.found.weight_version = version
        self._consumed_in_window = 0

    def _return(self, event: dict[str, Any]) -> None:
        for ordinal in event["groups"]:
            if self._expect(ordinal, "consumed", "enqueued") is not None:
                self._consumed_in_window -= 1

    def _cancel(self, event: dict[str, Any]) -> None:
        known = [ordinal for ordinal in event["groups"] if ordinal in self.groups]
        self._require(known == event["groups"], "groups are cancelled that are not outstanding")
        self._give_up(known, event["reason"])
        self._running = {rollout: place for rollout, place in self._running.items() if place[0] in self.groups}

    def _give_up(self, ordinals: list[int], reason: str) -> None:
        for ordinal in ordinals:
            group = self.groups.pop(ordinal)
            self._books["cancelled"][reason] += group.rollouts
            self._again.add(ordinal)

    def _expect(self, ordinal: int, state: str, becomes: str) -> _Group | None:
        group = self.groups.get(ordinal)
        if group is None or group.state != state:
            is_now = "not in flight" if group is None else group.state
            self._problem(f"group {ordinal} should be {state} to become {becomes}, and is {is_now}")
            return None
        group.state = becomes
        return group


def _check_metrics(run_dir: Path, result: Verification) -> None:
    path = run_dir / "metrics.jsonl"
    steps = []
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []  # a kill may have cut off the last one
    for number, line in enumerate(lines, 1):
        try:
            steps.append(json.loads(line)["step"])
        except (ValueError, LookupError, TypeError):
            result.problems.append(f"metrics.jsonl line {number} cannot be read")
    # A step is in the journal before its metrics are: a run that was killed in between has one line less. A start that
    # resumes cuts the metrics back to the checkpoint before it cuts the journal.
    complete = checkpoint.complete(run_dir / "checkpoints")
    resumed = int(complete[-1].name.removeprefix("step-")) if complete else 0
    if steps != list(range(1, len(steps) + 1)) or len(steps) not in (result.steps, result.steps - 1, resumed):
        result.problems.append(
            f"metrics.jsonl has the steps {_shortened(steps)}, events.jsonl has {result.steps} steps"
        )


def _check_summary(run_dir: Path, result: Verification, outstanding: int) -> None:
    path = run_dir / "summary.json"
    if not path.is_file():
        return
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        if summary["incarnation"] + 1 != result.incarnations:
            return  # of an earlier start; this one was killed or is still running
        said = {
            "optimizer_steps": (summary["optimizer_steps"], result.steps),
            "weight_version": (summary["weight_version"], result.weight_version),
            "books_by_reason": (
                {account: reasons for account, reasons in summary["books_by_reason"].items() if any(reasons.values())},
                {account: reasons for account, reasons in result.books.items() if reasons},
            ),
        }
        status = summary["status"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        result.problems.append(f"summary.json cannot be read: {type(error).__name__}: {error}")
        return
    for name, (summarised, replayed) in said.items():
        if summarised != replayed:
            result.problems.append(f"summary.json says {name} {summarised}, events.jsonl {replayed}")
    if status == "completed":
        if result.steps != result.planned_steps:
            result.problems.append(f"a completed run has {result.steps} of {result.planned_steps} planned steps")
        if outstanding:
            result.problems.append(f"a completed run left {outstanding} groups outstanding")


def _check_checkpoints(run_dir: Path, result: Verification) -> None:
    for folder in checkpoint.complete(run_dir / "checkpoints"):
        try:
            manifest = checkpoint.read(folder)
        except RunError as error:
            result.problems.append(str(error))
            continue
        if manifest["step"] > result.steps:
            result.problems.append(f"{folder.name} is of step {manifest['step']}, the journal ends at {result.steps}")


def _shortened(steps: list[Any]) -> str:
    return str(steps) if len(steps) <= 6 else f"[{steps[0]}, ..., {steps[-1]}] ({len(steps)} lines)"
