"""The rollouts of one task, from their start until they are trained, and the rules that filter them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rllm_core.algorithms.advantages import RoleEstimators
from rllm_core.algorithms.grouping import FilterReason, GroupOf, by_role, filter_reason, group_trajectories
from rllm_core.scope import CallTimes
from rllm_core.types import Episode, Trajectory, TrajectoryGroup

OBJECT_BYTES = 500


@dataclass
class Group:
    """The rollouts of one task; complete once all have succeeded and `GroupRules.close` did not filter them.

    Attributes:
        ordinal: Position of the task in the run's task stream.
        rollouts: Number of its rollouts.
        dispatched_version: Weight version that was live when the group was started.
        ended: Rollouts that have ended, by ``rollout_index``.
        calls: Durations of these rollouts' calls, by ``rollout_index``; not saved with the group.
        groups: Advantage groups of a complete group, one per role, without filtered ones.
        unscored: Indices of the rollouts that the group scorer could not score.
        left_out: Number of rollouts excluded from the advantage groups for their termination reason.
        filtered: Reason why no advantage group survived, if the optimizer step does not replace the group
            (``refill_filtered_groups = false``).
    """

    ordinal: int
    task_id: str
    epoch: int
    rollouts: int
    dispatched_version: int = 0
    ended: dict[int, Episode] = field(default_factory=dict)
    calls: dict[int, CallTimes] = field(default_factory=dict)
    unscored: list[int] = field(default_factory=list)
    groups: list[TrajectoryGroup] = field(default_factory=list)
    left_out: int = 0
    filtered: FilterReason | None = None

    def add(self, episode: Episode, calls: CallTimes | None = None) -> None:
        """Adds a rollout that has ended.

        Raises:
            ValueError: If it was added before.
        """
        if episode.rollout_index in self.ended:
            raise ValueError(f"rollout {episode.rollout_index} of task {self.task_id!r} was added twice")
        self.ended[episode.rollout_index] = episode
        if calls is not None:
            self.calls[episode.rollout_index] = calls

    def score(self, scored: Sequence[Episode], rewards: Mapping[str, float | None]) -> None:
        """Replaces the episodes with their ``scored`` copies; ``rewards`` maps rollout ids to scores."""
        self.ended = {episode.rollout_index: episode for episode in scored}
        self.unscored = [e.rollout_index for e in scored if rewards.get(e.rollout_id, 0.0) is None]

    @property
    def episodes(self) -> list[Episode]:
        """Rollouts that have ended, sorted by ``rollout_index``."""
        return [self.ended[index] for index in sorted(self.ended)]

    @property
    def is_whole(self) -> bool:
        """Whether all its rollouts have succeeded."""
        return sum(bool(episode.trajectories) for episode in self.ended.values()) == self.rollouts

    @property
    def running(self) -> list[int]:
        """Indices of the rollouts that have not ended."""
        return [index for index in range(self.rollouts) if index not in self.ended]

    @property
    def weight_version(self) -> int:
        """Oldest weight version among its tokens; `dispatched_version` if none was sampled."""
        versions = [group.weight_version for group in self.groups]
        versions += [e.weight_version for e in self.episodes if not self.groups and e.weight_version is not None]
        return min(versions, default=self.dispatched_version)

    @property
    def members(self) -> dict[str, list[list[int]]]:
        """Trajectories of each advantage group, as rollout index and position among its trainable trajectories.

        ``events.jsonl`` records them, since nothing else there shows which trajectories survived filtering.
        """
        places: dict[int, list[int]] = {}
        for episode in self.episodes:
            trainable = (trajectory for trajectory in episode.trajectories if trajectory.trainable)
            places |= {id(trajectory): [episode.rollout_index, place] for place, trajectory in enumerate(trainable)}
        return {group.role: [places[id(trajectory)] for trajectory in group.trajectories] for group in self.groups}

    @cached_property
    def rewards(self) -> list[list[float | None]]:
        """Total reward, or None, of each trajectory of each advantage group. Cached: read it only after scoring."""
        return [[t.total_reward if t.has_reward else None for t in group.trajectories] for group in self.groups]

    @cached_property
    def size_bytes(self) -> int:
        """Estimated memory of a complete group: shared arrays once, text, and a fixed amount per step and message."""
        return sum(_size_bytes(trajectory) for episode in self.episodes for trajectory in episode.trajectories)

    @property
    def has_media(self) -> bool:
        """Whether any prompt contains media such as images, whose content is not serialized."""
        return any(step.prompt_media for e in self.episodes for t in e.trajectories for step in t.steps)

    def to_json(self) -> str:
        """Serializes a complete group to one line, for `GroupRules.restore`."""
        episodes = ",".join(episode.to_json() for episode in self.episodes)
        names = ("ordinal", "task_id", "epoch", "dispatched_version", "unscored")
        head = json.dumps({name: getattr(self, name) for name in names})
        return f'{head[:-1]},"episodes":[{episodes}]}}'


@dataclass(frozen=True)
class GroupRules:
    """Decides which groups, and which of their rollouts, are trained.

    Attributes:
        estimators: Advantage estimators, which set the minimum group size.
        drop_uniform: Whether to filter groups whose rewards are all equal.
        refill: Whether a group filtered for the policy's results is replaced; otherwise the group counts as complete,
            with nothing to train.
        leave_out: Termination reasons that exclude a rollout from its groups.
    """

    estimators: RoleEstimators
    drop_uniform: bool
    refill: bool = True
    group_of: GroupOf = by_role
    leave_out: Collection[str] = ()

    def close(self, group: Group) -> FilterReason | None:
        """Forms the advantage groups once all rollouts have ended; returns the reason if the group is filtered."""
        episodes = group.episodes
        if not group.is_whole:
            return FilterReason.INCOMPLETE_GROUP
        wanted = [episode for episode in episodes if episode.termination_reason.value not in self.leave_out]
        left_out = len(episodes) - len(wanted)
        wanted = [episode for episode in wanted if episode.rollout_index not in group.unscored]
        kept, reason = [], FilterReason.NOTHING_SAMPLED if wanted else FilterReason.TERMINATION_REASON
        for of_role in group_trajectories(
            group.ordinal, group.task_id, wanted, self.group_of, dispatched_version=group.dispatched_version
        ):
            estimator = self.estimators.of(of_role.role)
            why = filter_reason(
                of_role,
                min_group_size=estimator.min_group_size,
                drop_uniform=self.drop_uniform,
                learns_written=estimator.learns_written,
            )
            if why is None:
                kept.append(of_role)
            elif not reason.is_of_policy:
                reason = why
        if group.unscored and not kept:
            reason = FilterReason.UNSCORED  # with their scores, the group might have been trained
        if not kept and (self.refill or not reason.is_of_policy):
            return reason
        group.groups, group.left_out = kept, left_out
        group.filtered = None if kept else reason
        return None

    def restore(self, line: str | bytes) -> Group:
        """Restores a complete group written by `Group.to_json`.

        Raises:
            ValueError: If the line is invalid, or the group would now be filtered.
        """
        written = json.loads(line)
        ended = {e.rollout_index: e for e in map(Episode.model_validate, written.pop("episodes"))}
        group = Group(**written, rollouts=len(ended), ended=ended)
        if (reason := self.close(group)) is not None:
            raise ValueError(f"group {group.ordinal} is no longer complete: {reason.value}")
        return group


def _size_bytes(trajectory: Trajectory) -> int:
    total, before = 0, None
    for step in trajectory.steps:
        sampled = step.completion_tokens
        # A prompt that continues the previous step shares its storage.
        shared = before is not None and step.segment == before.segment
        total += 4 * (sampled if shared else step.prompt_tokens + sampled) + 4 * sampled
        new = step.messages[len(before.messages) :] if before is not None else step.messages[:]
        total += OBJECT_BYTES + sum(OBJECT_BYTES + len(str(m.get("content") or "")) for m in (*new, step.response))
        before = step
    return total
