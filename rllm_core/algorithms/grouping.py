"""Grouping of a task's trajectories into advantage groups, and filtering of groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum

from rllm_core.algorithms.advantages import rewards
from rllm_core.algorithms.statistics import is_uniform
from rllm_core.types import Episode, Trajectory, TrajectoryGroup


class FilterReason(StrEnum):
    """Why successful rollouts were not trained."""

    INCOMPLETE_GROUP = "incomplete_group"
    TOO_FEW = "too_few_trajectories"
    UNIFORM_REWARD = "uniform_reward"
    NOTHING_SAMPLED = "nothing_sampled"
    TERMINATION_REASON = "termination_reason"
    UNSCORED = "unscored"

    @property
    def is_of_policy(self) -> bool:
        """Whether the reason reflects the policy's results, not a failure or the absence of sampled tokens."""
        return self not in (FilterReason.INCOMPLETE_GROUP, FilterReason.NOTHING_SAMPLED, FilterReason.UNSCORED)


def why_untrained(ended: Counter[str]) -> tuple[str, str]:
    """Returns the main reason why rollouts were not trained, and what to do about it.

    Args:
        ended: Numbers of filtered rollouts by `FilterReason`, and of those that ``failed``.
    """
    filtered = ended.total() - ended["failed"]
    if ended["failed"] > filtered:
        return "rollouts failed", "Fix what makes them fail, listed in summary.json"
    if 2 * ended[FilterReason.UNSCORED] > filtered:
        return "rollouts are unscored", "Fix the group scorer, whose error is in summary.json"
    if 2 * ended[FilterReason.NOTHING_SAMPLED] > filtered:
        fix = "Let run() of the workflow return the steps of completer.complete() in its episode"
        return "their episodes have no sampled steps", fix
    return "too many were filtered", "Try easier or harder tasks, algorithm.filter_uniform_groups = false"


GroupOf = Callable[[Episode, Trajectory], str]


def by_role(episode: Episode, trajectory: Trajectory) -> str:
    """Groups trajectories by role."""
    return trajectory.role


def group_trajectories(
    group_id: int,
    task_id: str,
    episodes: Sequence[Episode],
    group_of: GroupOf = by_role,
    *,
    dispatched_version: int = 0,
) -> list[TrajectoryGroup]:
    """Groups the trainable trajectories of one task. Groups are in order of first appearance.

    Args:
        group_id: Position of the task in the run's task stream.
        task_id: Task of all episodes.
        episodes: Finished rollouts, sorted by ``rollout_index``.
        group_of: Function that returns the group name of a trajectory.
        dispatched_version: Weight version at dispatch, used for groups without sampled tokens.
    """
    members: dict[str, list[tuple[Trajectory, str]]] = {}
    for episode in episodes:
        for trajectory in episode.trajectories:
            if trajectory.trainable and trajectory.steps:
                members.setdefault(group_of(episode, trajectory), []).append((trajectory, episode.rollout_id))
    groups = []
    for role, of_role in members.items():
        trajectories = [trajectory for trajectory, _ in of_role]
        versions = [step.weight_version for t in trajectories for step in t.steps if step.weight_version is not None]
        groups.append(
            TrajectoryGroup(
                group_id=group_id,
                task_id=task_id,
                role=role,
                trajectories=trajectories,
                rollout_ids=[rollout_id for _, rollout_id in of_role],
                weight_version=min(versions, default=dispatched_version),
            )
        )
    return groups


def filter_reason(
    group: TrajectoryGroup, *, min_group_size: int, drop_uniform: bool, learns_written: bool = False
) -> FilterReason | None:
    """Returns the reason why ``group`` is not trained, or None if it is trained.

    A group with missing rewards is never uniform, since its estimator needs none.

    Rewards are compared before any shaping: DAPO (arXiv 2503.14476, eq. 11) keeps a group if and only if some of its
    answers are right and some are wrong, independent of their length.
    """
    if len(group.trajectories) < min_group_size:
        return FilterReason.TOO_FEW
    if not any(learns_written or step.weight_version is not None for t in group.trajectories for step in t.steps):
        return FilterReason.NOTHING_SAMPLED
    has_rewards = all(trajectory.has_reward for trajectory in group.trajectories)
    if drop_uniform and has_rewards and is_uniform(rewards(group)):
        return FilterReason.UNIFORM_REWARD
    return None
