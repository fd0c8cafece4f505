"""Metrics: numbers with a declared reduction, one name each, the same on every backend."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

from rllm_core.config import RunConfig
from rllm_core.training.difficulty import ALL, NONE, SOME

logger = logging.getLogger(__name__)

Reduction = Literal["mean", "sum", "min", "max", "last"]

_REDUCE: dict[Reduction, Callable[[list[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "sum": math.fsum,
    "min": min,
    "max": max,
    "last": lambda values: values[-1],
}

# Every metric of the core. Backends add theirs in `UpdateResult.metrics`, one value per step ("last").
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


# In runs with a teacher.
TEACHER_METRICS: dict[str, Reduction] = {"teacher_kl_mean": "last", "teacher_unscored_tokens": "last"}


class MetricsAggregator:
    """Collects values during a step and reduces them at its end.

    Args:
        declared: Reduction by metric name; recording any other name is an error.
    """

    def __init__(self, declared: Mapping[str, Reduction]) -> None:
        self._declared = dict(declared)
        self._values: dict[str, list[float]] = defaultdict(list)

    def declare(self, name: str, reduction: Reduction) -> None:
        """Add a metric.

        Raises:
            ValueError: If it is declared with another reduction already.
        """
        if self._declared.setdefault(name, reduction) != reduction:
            raise ValueError(f"metric {name!r} is declared as {self._declared[name]!r}, not {reduction!r}")

    def record(self, name: str, *values: float) -> None:
        """Add values.

        Raises:
            KeyError: If the metric was not declared.
            ValueError: If a value is not a finite number.
        """
        if name not in self._declared:
            raise KeyError(f"metric {name!r} has no declared reduction")
        for value in values:
            if not math.isfinite(value):
                raise ValueError(f"metric {name!r} is {value}")
        self._values[name] += values

    def flush(self) -> dict[str, float]:
        """Reduce everything recorded since the last flush, sorted by name."""
        reduced = {
            name: float(_REDUCE[self._declared[name]](values))
            for name, values in sorted(self._values.items())
            if values
        }
        self._values.clear()
        return reduced


class Tracker(ABC):
    """Sends metrics somewhere. A failing tracker is reported and switched off; it never stops training."""

    name: ClassVar[str]

    @abstractmethod
    def start(self, config: RunConfig, run_dir: str) -> None:
        """A run begins or is resumed."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of an optimizer step, or of a validation (names then begin with ``validation/``)."""

    @abstractmethod
    def finish(self, status: str) -> None:
        """The run has ended."""


class Trackers:
    """The trackers of a run, each isolated from the others and from training."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._active = list(trackers)
        self.failed: dict[str, str] = {}

    def start(self, config: RunConfig, run_dir: str) -> None:
        """See `Tracker.start`."""
        self._each(lambda tracker: tracker.start(config, run_dir))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._each(lambda tracker: tracker.log(step, metrics))

    def finish(self, status: str) -> None:
        """See `Tracker.finish`."""
        self._each(lambda tracker: tracker.finish(status))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._active):
            try:
                call(tracker)
            except Exception as error:  # somebody else's library and network
                self._active.remove(tracker)
                self.failed[tracker.name] = f"{type(error).__name__}: {error}"
                logger.error("tracker %s failed and is switched off: %s", tracker.name, self.failed[tracker.name])
