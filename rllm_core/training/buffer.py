"""Complete groups between generation and training."""

from __future__ import annotations

import asyncio
import bisect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rllm_core.algorithms.advantages import AdvantageEstimator
from rllm_core.algorithms.grouping import FilterReason, filter_reason, group_by_role
from rllm_core.types import Episode, TrajectoryGroup


@dataclass
class CompleteGroup:
    """All rollouts of one task, grouped by role and ready to train.

    Attributes:
        ordinal: Position of the task in the run's task stream.
        episodes: The rollouts that ended well, by ``rollout_index``.
        groups: The trajectory groups that survived filtering.
        advantages: Per group and trajectory ``(steps,)``, if the estimator works group by group.
    """

    ordinal: int
    task_id: str
    epoch: int
    episodes: list[Episode]
    groups: list[TrajectoryGroup]
    advantages: list[list[npt.NDArray[np.float64]]] | None = None

    @property
    def weight_version(self) -> int:
        """The oldest version that sampled any of its tokens."""
        return min(group.weight_version for group in self.groups)


@dataclass
class Assembly:
    """Rollouts of one task that are still coming in."""

    ordinal: int
    task_id: str
    epoch: int
    expected: int
    episodes: dict[int, Episode] = field(default_factory=dict)

    def add(self, episode: Episode) -> bool:
        """Take in a finished rollout; True when it was the last.

        Raises:
            ValueError: If that rollout has been taken in before.
        """
        if episode.rollout_index in self.episodes:
            raise ValueError(f"rollout {episode.rollout_index} of task {self.task_id!r} came in twice")
        self.episodes[episode.rollout_index] = episode
        return len(self.episodes) == self.expected


class TrajectoryGroupBuffer:
    """Groups what generation finishes, filters it, computes advantages, and hands out the oldest first.

    Args:
        estimator: Runs here, per group, if its scope is ``group``.
        drop_uniform: Filter groups whose rewards are all equal.
        in_order: Hand a group out only when every group dispatched before it has been handed out or dropped. Together
            with the coordinator's window this bounds the age of every single group.
    """

    def __init__(self, estimator: AdvantageEstimator, *, drop_uniform: bool, in_order: bool = False) -> None:
        self.estimator = estimator
        self.drop_uniform = drop_uniform
        self.in_order = in_order
        self._running: set[int] = set()
        self._complete: list[CompleteGroup] = []
        self._waiting: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None

    def __len__(self) -> int:
        return len(self._complete)

    def close_group(self, assembly: Assembly) -> CompleteGroup | FilterReason:
        """Turn an assembly whose rollouts have all ended into a complete group, or say why not."""
        episodes = [assembly.episodes[index] for index in sorted(assembly.episodes)]
        finished = [episode for episode in episodes if episode.trajectories]
        if len(finished) < assembly.expected:
            return FilterReason.INCOMPLETE_GROUP
        kept, reason = [], FilterReason.NOTHING_SAMPLED
        for group in group_by_role(assembly.ordinal, assembly.task_id, finished):
            why = filter_reason(group, min_group_size=self.estimator.min_group_size, drop_uniform=self.drop_uniform)
            if why is None:
                kept.append(group)
            else:
                reason = why
        if not kept:
            return reason
        advantages = self.estimator(kept) if self.estimator.scope == "group" else None
        return CompleteGroup(assembly.ordinal, assembly.task_id, assembly.epoch, finished, kept, advantages)

    def expect(self, ordinal: int) -> None:
        """A group has been dispatched."""
        self._running.add(ordinal)

    def put(self, group: CompleteGroup) -> None:
        """Add a complete group; order of arrival does not matter."""
        self._running.discard(group.ordinal)
        bisect.insort(self._complete, group, key=lambda item: item.ordinal)
        self._wake()

    def drop(self, ordinal: int) -> None:
        """A dispatched group will not come."""
        self._running.discard(ordinal)
        self._wake()

    async def take(self, groups: int) -> list[CompleteGroup]:
        """Wait for ``groups`` complete groups and remove the oldest.

        Raises:
            BaseException: Whatever `fail` was called with.
        """
        while not self._holds(groups) and self._failure is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self._failure is not None:
            raise self._failure
        taken, self._complete = self._complete[:groups], self._complete[groups:]
        return taken

    def _holds(self, groups: int) -> bool:
        if len(self._complete) < groups:
            return False
        return not self.in_order or self._complete[groups - 1].ordinal < min(self._running, default=sys.maxsize)

    def ordinals(self) -> list[int]:
        """Ordinals of the groups waiting here."""
        return [group.ordinal for group in self._complete]

    def discard(self) -> Sequence[CompleteGroup]:
        """Empty the buffer and return what was in it."""
        discarded, self._complete = self._complete, []
        return discarded

    def fail(self, error: BaseException) -> None:
        """Let every waiting and later `take` raise ``error``."""
        self._failure = error
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
