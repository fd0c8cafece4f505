"""Where the time of a run goes: who is busy, who waits, and what running side by side gains.

A step of a synchronous loop takes ``M + t + s`` seconds: until the last of its rollouts has ended, to train, to send
the weights. Side by side no loop takes less than ``max(g, t)``, where ``g`` is what the rollouts take on places that
are all busy. What is between two steps (validation, checkpoints) counts as training here, since it keeps the trainer.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rllm_core.config import RunConfig
from rllm_core.training.buffer import TrajectoryGroupBuffer
from rllm_core.training.coordinator import Hold, SyncCoordinator
from rllm_core.training.slots import Slots

STEPS_AVERAGED = 16
Purpose = Literal["generation_wait", "training", "drain", "sync"]


@dataclass(frozen=True)
class Now:
    """What is in flight at a moment.

    Attributes:
        rollouts: Rollouts that run, those of a validation among them.
        max_rollouts: Rollouts for training that may run at a time.
        groups_in_flight: Groups that are being generated.
        groups_waiting: Complete groups that wait to be trained.
        hold: What keeps further groups from being started.
    """

    rollouts: int
    max_rollouts: int
    groups_in_flight: int
    groups_waiting: int
    hold: Hold | None


@dataclass(frozen=True)
class _Step:
    """What one optimizer step took, from the end of the one before, in seconds."""

    wall: float
    generation: float  # g
    training: float  # t, and what is between the steps
    sync: float
    rollouts: int


class Pace:
    """Measures a run, step by step.

    Args:
        config: The resolved run file.
        colocated: Whether generation and training take turns on the same devices, so that nothing can overlap.
        slots: Places of rollouts.
        coordinator: Knows what is in flight.
        buffer: Knows what waits.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        colocated: bool,
        slots: Slots,
        coordinator: SyncCoordinator,
        buffer: TrajectoryGroupBuffer,
    ) -> None:
        derived, training = config.derived(), config.training
        self.slots = slots
        self.coordinator = coordinator
        self.buffer = buffer
        self.max_rollouts = derived["max_rollouts_in_flight"]
        self._colocated = colocated
        self._is_synchronous = training.staleness_threshold == 0 and training.trigger_parameter_sync_step == 1
        self._rollouts_per_step = derived["rollouts_per_step"]
        windows = 0 if self._is_synchronous else math.ceil(1 + training.staleness_threshold)
        self._filling_steps = windows * training.trigger_parameter_sync_step
        self._steps: deque[_Step] = deque(maxlen=STEPS_AVERAGED)
        self._batches: deque[float] = deque(maxlen=STEPS_AVERAGED)  # seconds that a synchronous loop would wait for one
        self._pending: list[tuple[float, float]] = []
        self.begin()

    def begin(self) -> None:
        """The first step begins now."""
        self._since, self._place_seconds = time.monotonic(), self.slots.place_seconds
        self.slots.held.clear()
        self.begin_step()

    def now(self) -> Now:
        """What is in flight; cheap, and harmless from another thread."""
        coordinator = self.coordinator
        return Now(self.slots.in_use, self.max_rollouts, coordinator.in_flight, len(self.buffer), coordinator.hold)

    @contextlib.contextmanager
    def spending(self, purpose: Purpose) -> Iterator[None]:
        """What happens in here takes time of the optimizer step: one thing after the other, never two at a time."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._spent[purpose] += time.monotonic() - began

    def begin_step(self) -> None:
        """The trainer turns to its next optimizer step."""
        self._step_since = time.monotonic()
        self._spent: dict[Purpose, float] = {"generation_wait": 0.0, "training": 0.0, "drain": 0.0, "sync": 0.0}

    def end_step(self) -> dict[str, float | None]:
        """The optimizer step that was begun has ended.

        Returns:
            What ``timings.jsonl`` says of it.
        """
        since, before, spent = self._since, self._place_seconds, self._spent
        self._since, self._place_seconds = time.monotonic(), self.slots.place_seconds
        wall, in_use = self._since - since, self._place_seconds - before
        step, between = self._since - self._step_since, self._step_since - since
        held, now = list(self.slots.held), self.now()
        self.slots.held.clear()
        # While the pipeline fills, more is generated than a step needs, and while it empties less.
        if self._filling_steps:
            self._filling_steps -= 1
        elif now.hold != "end":
            generation = sum(seconds for _, seconds in held) / self.max_rollouts
            self._steps.append(_Step(wall, generation, spent["training"] + between, spent["sync"], len(held)))
            self._add_batches(held)
        speedup, bound = self._speedup()
        return {
            "step_seconds": step,
            **{f"{purpose}_seconds": seconds for purpose, seconds in spent.items()},
            "between_steps_seconds": between,
            "generation_idle_share": _idle(in_use, wall * self.max_rollouts),
            "training_idle_share": _share(spent["generation_wait"] + spent["drain"], step),
            "rollouts_in_flight": now.rollouts,
            "groups_in_flight": now.groups_in_flight,
            "groups_waiting": now.groups_waiting,
            "speedup_over_synchronous": speedup,
            "speedup_bound": bound,
        }

    def _add_batches(self, held: Sequence[tuple[float, float]]) -> None:
        self._pending += held
        size = self._rollouts_per_step
        while len(self._pending) >= size:
            batch, self._pending = self._pending[:size], self._pending[size:]
            # In the order of their starts: whatever ends late would otherwise seem to have begun late.
            self._batches.append(makespan([seconds for _, seconds in sorted(batch)], self.max_rollouts))

    def _speedup(self) -> tuple[float | None, float | None]:
        """How many times as fast as a synchronous loop the last steps were, and could have been; None if not known."""
        steps = self._steps
        if self._colocated or not steps or not self._batches:
            return None, None
        wall, training = (
            statistics.fmean(step.wall for step in steps),
            statistics.fmean(step.training for step in steps),
        )
        generation = statistics.fmean(step.generation for step in steps)
        if self._is_synchronous:
            synchronous = wall
        else:
            # What is filtered has to be generated by a synchronous loop as well.
            rounds = max(1.0, statistics.fmean(step.rollouts for step in steps) / self._rollouts_per_step)
            sync = statistics.fmean(step.sync for step in steps)
            synchronous = rounds * statistics.fmean(self._batches) + training + sync
        return _ratio(synchronous, wall), _ratio(synchronous, max(generation, training))


def makespan(seconds: Sequence[float], places: int) -> float:
    """How long it takes until jobs of so many ``seconds``, begun in that order, have all ended on so many places."""
    free_at = [0.0] * min(places, len(seconds))
    ends = [heapq.heapreplace(free_at, free_at[0] + job) + job for job in seconds]
    return max(ends, default=0.0)


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0


def _idle(used: float, offered: float) -> float:
    return 1.0 - _share(used, offered) if offered > 0 else 0.0


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None
