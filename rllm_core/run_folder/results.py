"""Records that the training loop reports: trained groups, validation results, and the work in flight."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rllm_core.types import Episode, TrajectoryGroup


class ConsumedGroup(Protocol):
    """Group of an optimizer step, such as `rllm_core.training.group.Group`."""

    @property
    def epoch(self) -> int: ...
    @property
    def episodes(self) -> Sequence[Episode]: ...
    @property
    def groups(self) -> Sequence[TrajectoryGroup]: ...
    @property
    def rewards(self) -> Sequence[Sequence[float | None]]: ...
    @property
    def weight_version(self) -> int: ...


@dataclass(frozen=True)
class ValidationResult:
    """Result of one validation.

    Attributes:
        step: Number of optimizer steps behind the weights.
        weight_version: Weight version that was measured.
        rollouts: Successful rollouts.
        failed: Failed rollouts; excluded from the fields below.
        reward_mean: Mean over rollouts of the mean total reward of their trajectories; None if no rollout succeeded or
            there are no rewards.
        solved: Share of rollouts that are correct; None if the workflow does not set ``is_correct``.
        nll_per_token: Mean negative log-likelihood of the target tokens, in nats; None if there are none.
        metrics: Means of the workflow's metrics (`rllm_core.types.Episode.metrics`), each over rollouts that have it.
        retries: Failed attempts that were retried; excluded from all other fields.
    """

    step: int
    weight_version: int
    rollouts: int
    failed: int
    reward_mean: float | None
    solved: float | None
    nll_per_token: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    retries: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the content for ``summary.json``."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class Now:
    """Snapshot of the work in flight.

    Attributes:
        rollouts: Running rollouts, including those of a validation.
        max_rollouts: Maximum concurrent rollouts for training.
        groups_in_flight: Groups in generation.
        groups_waiting: Complete groups waiting to be trained.
        hold: Reason why no further group can start.
        groups_scored: Groups whose rollouts have ended and wait for the group scorer, also those of a validation.
    """

    rollouts: int
    max_rollouts: int
    groups_in_flight: int
    groups_waiting: int
    hold: str | None
    groups_scored: int = 0


def metric_means(episodes: Sequence[Episode]) -> dict[str, float]:
    """Averages the workflow's own metrics, each over the episodes that have it; sorted by name."""
    values: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode.metrics.items():
            values[name].append(value)
    return {name: math.fsum(found) / len(found) for name, found in sorted(values.items())}
