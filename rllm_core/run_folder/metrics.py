"""Metrics of an optimizer step: how each is computed and reduced. They have the same names on every backend."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from rllm_core.algorithms.statistics import is_uniform
from rllm_core.distillation.teacher import UNSCORED_TOKENS
from rllm_core.run_folder.difficulty import ALL, NONE, SOME
from rllm_core.run_folder.results import ConsumedGroup, metric_means
from rllm_core.types import FinishReason, TrainingSample, Trajectory

WORKFLOW = "workflow"  # prefix of metrics from the workflow's episodes

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
    "sampled_entropy": "last",
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

    def record(self, name: str, *values: float, reduction: Reduction | None = None) -> None:
        """Records values; a ``reduction`` declares the metric first.

        Raises:
            KeyError: If the metric is not declared.
            ValueError: If a value is not a finite number, or the metric is declared with another reduction.
        """
        if reduction is not None and self._declared.setdefault(name, reduction) != reduction:
            raise ValueError(f"metric {name!r} is declared as {self._declared[name]!r}, not {reduction!r}")
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


def record_step(
    metrics: MetricsAggregator,
    consumed: Sequence[ConsumedGroup],
    samples: Sequence[TrainingSample],
    weight_version: int,
) -> None:
    """Records the core's metrics of an optimizer step. ``weight_version`` is the version before the step."""
    record = metrics.record
    groups = [group for item in consumed for group in item.groups]
    trained = [trajectory for group in groups for trajectory in group.trajectories]
    trajectories = _trajectories(consumed)
    rewarded = [np.array(of_group) for item in consumed for of_group in item.rewards if None not in of_group]
    rewards: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.has_reward:
            rewards[trajectory.role].append(trajectory.total_reward)
    flat = [reward for of_role in rewards.values() for reward in of_role]
    ages = [weight_version - item.weight_version for item in consumed]
    judged = [e.is_correct for item in consumed for e in item.episodes if e.is_correct is not None]
    record("groups", sum(1 for item in consumed if item.groups))
    record("trajectories", len(trained))
    record("samples", len(samples))
    record("staleness_mean", *ages)
    record("staleness_max", *ages)
    record("solved", *judged)
    record("reward_mean", *flat)
    record("trajectory_reward_min", *flat)
    record("trajectory_reward_max", *flat)
    if len(rewards) > 1:
        for role, of_role in rewards.items():
            record(f"reward_mean/{role}", *of_role, reduction="mean")
    record("uniform_groups_share", *(is_uniform(of_group) for of_group in rewarded))
    record("turns_mean", *(len(t.steps) for t in trajectories))
    record("response_tokens_mean", *(sum(s.completion_tokens for s in t.steps) for t in trajectories))
    breaks = Counter(s.break_reason for t in trajectories for s in t.steps if s.break_reason is not None)
    record("segment_breaks", breaks.total())
    for reason, count in breaks.items():
        record(f"segment_breaks/{reason}", count, reduction="sum")
    record("control_tokens_in_text", sum(s.control_tokens for t in trajectories for s in t.steps))
    record("truncated_share", *(any(s.finish_reason is FinishReason.LENGTH for s in t.steps) for t in trajectories))
    for name, value in metric_means([episode for item in consumed for episode in item.episodes]).items():
        record(f"{WORKFLOW}/{name}", value, reduction="last")
    record("sampled_tokens", sum(sample.sampled_tokens for sample in samples))
    known = [sample.logprobs for sample in samples if sample.logprobs is not None]
    logprobs = np.concatenate(known) if known else np.empty(0)
    if len(logprobs):
        record("sampled_entropy", 0.0 - float(logprobs.mean(dtype=np.float64)))
    if samples:
        record("distinct_samples_share", len({s.token_ids.tobytes() for s in samples}) / len(samples))


def record_teacher(metrics: MetricsAggregator, consumed: Sequence[ConsumedGroup]) -> None:
    """Records the distance between the policy and its teacher, over the scored tokens."""
    sampled = [step for t in _trajectories(consumed) for step in t.steps if step.weight_version is not None]
    steps = [step for step in sampled if step.advantages is not None]
    unscored = sum(len(step.metadata.get(UNSCORED_TOKENS, ())) for step in steps)
    scored = sum(step.completion_tokens for step in steps) - unscored
    metrics.record("teacher_unscored_tokens", unscored, reduction="last")
    if scored:
        ratios = [float(s.advantages.sum(dtype=np.float64)) for s in steps if s.advantages is not None]
        metrics.record("teacher_kl_mean", -sum(ratios) / scored, reduction="last")


def _trajectories(consumed: Sequence[ConsumedGroup]) -> list[Trajectory]:
    """Returns the trajectories of trained groups, and of groups that were filtered without replacement.

    Rewards of trained groups alone would not describe the policy.
    """
    trained = [trajectory for item in consumed for group in item.groups for trajectory in group.trajectories]
    untrained = [t for item in consumed if not item.groups for e in item.episodes for t in e.trajectories]
    return [*trained, *(t for t in untrained if t.trainable and t.steps)]
