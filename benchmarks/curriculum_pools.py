"""Difficulty pools as in prime-rl, as a task sampler: the baseline of `benchmarks.curriculum`.

Tasks start in the pool ``normal``. After each group, a task moves to ``easy`` if the mean reward is at least
``easy_threshold``, to ``hard`` if it is at most ``hard_threshold``, and otherwise to ``normal``. A fraction of the
draws comes from ``easy`` and from ``hard``, uniformly within the pool; what a pool lacks comes from ``normal``.
prime-rl splits each batch by these fractions, here every draw has them as probabilities.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from pydantic import Field

from rllm_core.algorithms.task_sampler import GroupResult, TaskSampler
from rllm_core.config import Section
from rllm_core.seeds import derive_seed
from rllm_core.types import Task


class PoolsOptions(Section):
    """``[training.sampler_options]``."""

    easy_threshold: float = Field(default=1.0, description="Mean reward from which a task is easy.")
    hard_threshold: float = Field(default=0.0, description="Mean reward up to which a task is hard.")
    easy_fraction: float = Field(default=0.1, ge=0, le=1, description="Fraction of the draws from the easy tasks.")
    hard_fraction: float = Field(default=0.1, ge=0, le=1, description="Fraction of the draws from the hard tasks.")


class Pools(TaskSampler):
    """Pools of easy, normal and hard tasks."""

    options_model = PoolsOptions
    options: PoolsOptions

    def begin(self, tasks: Sequence[Task], seed: int) -> None:
        """See `TaskSampler.begin`."""
        self._seed, self._drawn = seed, 0
        self._pools = ["normal"] * len(tasks)
        self._waiting: dict[int, int] = {}

    def next(self, n: int) -> list[int]:
        """See `TaskSampler.next`."""
        return [self._next() for _ in range(n)]

    def _next(self) -> int:
        rng = random.Random(derive_seed(self._seed, "pools", self._drawn))
        share, busy = rng.random(), set(self._waiting.values())
        easy, hard = self.options.easy_fraction, self.options.hard_fraction
        wanted = "easy" if share < easy else "hard" if share < easy + hard else "normal"
        for pool in (wanted, "normal", None):
            able = [at for at, of in enumerate(self._pools) if pool in (of, None) and at not in busy]
            if able:
                break
        position = rng.choice(able or range(len(self._pools)))
        self._waiting[self._drawn] = position
        self._drawn += 1
        return position

    def observe(self, result: GroupResult) -> None:
        """See `TaskSampler.observe`."""
        position = self._waiting.pop(result.ordinal)
        if not result.rewards:
            return
        mean, options = fmean(result.rewards), self.options
        is_easy, is_hard = mean >= options.easy_threshold, mean <= options.hard_threshold
        self._pools[position] = "easy" if is_easy else "hard" if is_hard else "normal"

    def state_dict(self) -> dict[str, Any]:
        """See `TaskSampler.state_dict`."""
        waiting = {str(ordinal): position for ordinal, position in self._waiting.items()}
        return {"drawn": self._drawn, "pools": self._pools, "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `TaskSampler.load_state_dict`."""
        self._drawn, self._pools = state["drawn"], list(state["pools"])
        self._waiting = {int(ordinal): position for ordinal, position in state["waiting"].items()}
