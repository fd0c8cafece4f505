"""Measures how a run spends its time and how much speed asynchrony gains.

A synchronous step takes ``M + t + s`` seconds: ``M`` until its last rollout ends, ``t`` to train, ``s`` to send
weights. An asynchronous step takes at least ``max(g, t)``, where ``g`` is the generation time with all slots in use.
Validation and checkpoints between steps count as training, because the trainer is busy.
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
from rllm_core.limits.slots import Slots
from rllm_core.run_folder.results import Now
from rllm_core.training.buffer import GroupBuffer
from rllm_core.training.scoring import Scoring
from rllm_core.training.staleness_limit import SyncCoordinator

STEPS_AVERAGED = 16
Purpose = Literal["generation_wait", "training", "drain", "sync"]


@dataclass(frozen=True)
class _Step:
    """Seconds of one optimizer step, from the end of the previous one."""

    wall: float
    generation: float  # g
    training: float  # t, including the time between steps
    sync: float
    rollouts: int


class Pace:
    """Measures a run, step by step.

    Args:
        scoring: Scoring of groups, if a scorer gives the rewards.
        colocated: Whether generation and training take turns on the same devices, so that nothing overlaps.
    """

    def __init__(
        self,
        config: RunConfig,
        slots: Slots,
        coordinator: SyncCoordinator,
        buffer: GroupBuffer,
        scoring: Scoring | None = None,
        *,
        colocated: bool,
    ) -> None:
        derived, training = config.derived(), config.training
        self.slots = slots
        self.coordinator = coordinator
        self.buffer = buffer
        self.scoring = scoring
        self.max_rollouts = derived["max_rollouts_in_flight"]
        self._colocated = colocated
        self._is_synchronous = training.staleness_threshold == 0 and training.trigger_parameter_sync_step == 1
        self._rollouts_per_step = derived["rollouts_per_step"]
        windows = 0 if self._is_synchronous else math.ceil(1 + training.staleness_threshold)
        self._filling_steps = windows * training.trigger_parameter_sync_step
        self._steps: deque[_Step] = deque(maxlen=STEPS_AVERAGED)
        # Seconds that a synchronous loop would wait for a batch.
        self._batches: deque[float] = deque(maxlen=STEPS_AVERAGED)
        self._pending: list[tuple[float, float]] = []
        self.begin()

    def begin(self) -> None:
        """Starts the measurement at the first step."""
        self._since, self._place_seconds = time.monotonic(), self.slots.place_seconds
        self.slots.held.clear()
        self.begin_step()

    def now(self) -> Now:
        """Returns the work in flight; cheap and thread-safe."""
        return Now(
            rollouts=self.slots.in_use,
            max_rollouts=self.max_rollouts,
            groups_in_flight=self.coordinator.in_flight,
            groups_waiting=len(self.buffer),
            hold=self.coordinator.hold,
            groups_scored=self.scoring.in_progress if self.scoring is not None else 0,
        )

    @contextlib.contextmanager
    def spending(self, purpose: Purpose) -> Iterator[None]:
        """Counts the time in this context for a purpose of the optimizer step; contexts must not overlap."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._spent[purpose] += time.monotonic() - began

    def begin_step(self) -> None:
        """Starts the next optimizer step."""
        self._step_since = time.monotonic()
        self._spent: dict[Purpose, float] = {"generation_wait": 0.0, "training": 0.0, "drain": 0.0, "sync": 0.0}

    def end_step(self) -> dict[str, float | None]:
        """Ends the current optimizer step; returns its timings, for ``timings.jsonl``."""
        since, before, spent = self._since, self._place_seconds, self._spent
        self._since, self._place_seconds = time.monotonic(), self.slots.place_seconds
        wall, in_use = self._since - since, self._place_seconds - before
        step, between = self._since - self._step_since, self._step_since - since
        held, now = list(self.slots.held), self.now()
        self.slots.held.clear()
        # A filling pipeline generates more than a step needs, and an emptying one less.
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
            # By start time: rollouts that end late did not start late.
            self._batches.append(makespan([seconds for _, seconds in sorted(batch)], self.max_rollouts))

    def _speedup(self) -> tuple[float | None, float | None]:
        """Returns the speed-up of the last steps over a synchronous loop and its upper bound; None if unknown."""
        steps = self._steps
        if self._colocated or not steps or not self._batches:
            return None, None
        wall = statistics.fmean(step.wall for step in steps)
        training = statistics.fmean(step.training for step in steps)
        generation = statistics.fmean(step.generation for step in steps)
        if self._is_synchronous:
            synchronous = wall
        else:
            # A synchronous loop would generate the filtered groups as well.
            rounds = max(1.0, statistics.fmean(step.rollouts for step in steps) / self._rollouts_per_step)
            sync = statistics.fmean(step.sync for step in steps)
            synchronous = rounds * statistics.fmean(self._batches) + training + sync
        return _ratio(synchronous, wall), _ratio(synchronous, max(generation, training))


def makespan(seconds: Sequence[float], places: int) -> float:
    """Returns when the last of several jobs ends, if they start in this order on ``places`` slots."""
    free_at = [0.0] * min(places, len(seconds))
    ends = [heapq.heapreplace(free_at, free_at[0] + job) + job for job in seconds]
    return max(ends, default=0.0)


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0


def _idle(used: float, offered: float) -> float:
    return 1.0 - _share(used, offered) if offered > 0 else 0.0


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None
