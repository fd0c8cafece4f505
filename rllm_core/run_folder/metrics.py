"""Metrics with declared reductions and the same names on every backend."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Literal

from rllm_core.run_folder.difficulty import ALL, NONE, SOME

Reduction = Literal["mean", "sum", "min", "max", "last"]

_REDUCE: dict[Reduction, Callable[[list[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "sum": math.fsum,
    "min": min,
    "max": max,
    "last": lambda values: values[-1],
}

# All metrics of the core. Backends add their own in `UpdateResult.metrics`, one value per step ("last").
CORE_METRICS: dict[str, Reduction] = {
    "reward_mean": "mean",
    "solved": "mean",
    "trajectory_reward_min": "min",
    "trajectory_reward_max": "max",
    "turns_mean": "mean",
    "response_tokens_mean": "mean",
    "truncated_share": "mean",
    "uniform_groups_share": "mean",
    NONE: "last",
    SOME: "last",
    ALL: "last",
    "staleness_mean": "mean",
    "staleness_max": "max",
    "groups": "sum",
    "trajectories": "sum",
    "samples": "sum",
    "sampled_tokens": "sum",
    "segment_breaks": "sum",
    "control_tokens_in_text": "sum",
    "distinct_samples_share": "last",
}


class MetricsAggregator:
    """Collects values during a step, and reduces them at its end.

    Args:
        declared: Reduction by metric name; recording any other name is an error.
    """

    def __init__(self, declared: Mapping[str, Reduction]) -> None:
        self._declared = dict(declared)
        self._values: dict[str, list[float]] = defaultdict(list)

    def declare(self, name: str, reduction: Reduction) -> None:
        """Declares a metric.

        Raises:
            ValueError: If it is already declared with another reduction.
        """
        if self._declared.setdefault(name, reduction) != reduction:
            raise ValueError(f"metric {name!r} is declared as {self._declared[name]!r}, not {reduction!r}")

    def record(self, name: str, *values: float, reduction: Reduction | None = None) -> None:
        """Records values; a ``reduction`` declares the metric first.

        Raises:
            KeyError: If the metric is not declared.
            ValueError: If a value is not a finite number.
        """
        if reduction is not None:
            self.declare(name, reduction)
        if name not in self._declared:
            raise KeyError(f"metric {name!r} has no declared reduction")
        for value in values:
            if not math.isfinite(value):
                raise ValueError(f"metric {name!r} is {value}")
        self._values[name] += values

    def flush(self) -> dict[str, float]:
        """Reduces all values recorded since the last flush, sorted by name."""
        reduced = {
            name: float(_REDUCE[self._declared[name]](values))
            for name, values in sorted(self._values.items())
            if values
        }
        self._values.clear()
        return reduced
