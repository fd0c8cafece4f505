"""Buffer for complete groups between generation and training."""

from __future__ import annotations

import asyncio
import bisect
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rllm_core.algorithms.advantages import Credit, RoleEstimators
from rllm_core.algorithms.grouping import FilterReason, GroupOf, by_role, filter_reason, group_trajectories
from rllm_core.run_folder.journal import writing
from rllm_core.training.books import Account
from rllm_core.types import Episode, Trajectory, TrajectoryGroup

OBJECT_BYTES = 500


@dataclass
class CompleteGroup:
    """All rollouts of one task, grouped by role and ready to train.

    Attributes:
        ordinal: Position of the task in the run's task stream.
        episodes: Rollouts that succeeded, by ``rollout_index``.
        groups: Advantage groups that survived filtering.
        advantages: Advantages per group and trajectory, if they can be computed already.
        left_out: Number of episodes excluded from the groups for their termination reason.
        dispatched_version: Weight version that was live when the group was started.
        filtered: Reason why no group survived, if the optimizer step does not replace it (``refill_filtered_groups =
            false``).
    """

    ordinal: int
    task_id: str
    epoch: int
    episodes: list[Episode]
    groups: list[TrajectoryGroup]
    advantages: list[list[Credit]] | None = None
    left_out: int = 0
    dispatched_version: int = 0
    filtered: FilterReason | None = None

    @property
    def weight_version(self) -> int:
        """Oldest weight version among its tokens; `dispatched_version` if none was sampled."""
        versions = [group.weight_version for group in self.groups]
        versions += [e.weight_version for e in self.episodes if not self.groups and e.weight_version is not None]
        return min(versions, default=self.dispatched_version)

    @property
    def accounts(self) -> list[tuple[Account, str, int]]:
        """Outcome, reason and number of its rollouts, once it has been trained."""
        if self.filtered is not None:
            return [("filtered", self.filtered.value, len(self.episodes))]
        trained: tuple[Account, str, int] = ("trained", "trained", len(self.episodes) - self.left_out)
        if not self.left_out:
            return [trained]
        return [trained, ("filtered", FilterReason.TERMINATION_REASON.value, self.left_out)]

    @property
    def members(self) -> dict[str, list[list[int]]]:
        """Trajectories of each group, as rollout index and position among its trainable trajectories.

        ``events.jsonl`` records them, since nothing else there shows which trajectories survived filtering.
        """
        places: dict[int, list[int]] = {}
        for episode in self.episodes:
            trainable = (trajectory for trajectory in episode.trajectories if trajectory.trainable)
            places |= {id(trajectory): [episode.rollout_index, place] for place, trajectory in enumerate(trainable)}
        return {group.role: [places[id(trajectory)] for trajectory in group.trajectories] for group in self.groups}

    @cached_property
    def size_bytes(self) -> int:
        """Estimated memory: shared arrays once, text, and a fixed amount per step and message."""
        return sum(_size_bytes(trajectory) for episode in self.episodes for trajectory in episode.trajectories)

    def to_json(self) -> str:
        """Serializes the group to one line, for `TrajectoryGroupBuffer.restore`."""
        episodes = ",".join(episode.to_json() for episode in self.episodes)
        names = ("ordinal", "task_id", "epoch", "dispatched_version")
        head = json.dumps({name: getattr(self, name) for name in names})
        return f'{head[:-1]},"episodes":[{episodes}]}}'

    @property
    def has_media(self) -> bool:
        """Whether any prompt contains media such as images, whose content is not serialized."""
        return any(step.prompt_media for e in self.episodes for t in e.trajectories for step in t.steps)


def _size_bytes(trajectory: Trajectory) -> int:
    total, before = 0, None
    for step in trajectory.steps:
        sampled = len(step.completion_ids)
        # A prompt that continues the previous step shares its storage.
        shared = before is not None and step.segment == before.segment
        total += 4 * (sampled if shared else len(step.prompt_ids) + sampled) + 4 * sampled
        new = step.messages[len(before.messages) :] if before is not None else step.messages[:]
        total += OBJECT_BYTES + sum(OBJECT_BYTES + len(str(m.get("content") or "")) for m in (*new, step.response))
        before = step
    return total


@dataclass(frozen=True)
class SpilledGroup:
    """A complete group that waits on disk."""

    ordinal: int
    path: Path

    @classmethod
    def write(cls, folder: Path, group: CompleteGroup) -> SpilledGroup:
        """Writes ``group`` to a file in ``folder``."""
        path = folder / f"group-{group.ordinal}.jsonl"
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(group.to_json() + "\n", encoding="utf-8")
        return cls(group.ordinal, path)

    def read(self) -> bytes:
        """Reads the group's line."""
        return self.path.read_bytes()


@dataclass
class Assembly:
    """A group whose rollouts are still running."""

    ordinal: int
    task_id: str
    epoch: int
    expected: int
    episodes: dict[int, Episode] = field(default_factory=dict)
    dispatched_version: int = 0

    def add(self, episode: Episode) -> bool:
        """Adds a finished rollout; returns True if it was the last one.

        Raises:
            ValueError: If the rollout was added before.
        """
        if episode.rollout_index in self.episodes:
            raise ValueError(f"rollout {episode.rollout_index} of task {self.task_id!r} was added twice")
        self.episodes[episode.rollout_index] = episode
        return len(self.episodes) == self.expected


class TrajectoryGroupBuffer:
    """Filters complete groups, computes advantages, and hands out the oldest groups first.

    Args:
        estimators: Advantage estimators, which also set the minimum group size.
        credits_groups: Whether advantages are computed here, per group, instead of when groups are consumed.
        drop_uniform: Whether to filter groups whose rewards are all equal.
        refill: Whether a group filtered for the policy's results is replaced; otherwise it is handed out with nothing
            to train.
        group_of: Function that returns a trajectory's group name.
        leave_out: Termination reasons that exclude a rollout from its groups.
        max_bytes: Memory limit; complete groups beyond it pause generation (`is_full`), or go to ``spill``.
        spill: Folder for complete groups beyond the limit; None keeps all in memory.
        in_order: Whether a group waits until all groups started before it have been handed out or dropped. Together
            with the coordinator's window, this limits the staleness of every group.
    """

    def __init__(
        self,
        estimators: RoleEstimators,
        *,
        credits_groups: bool,
        drop_uniform: bool,
        refill: bool = True,
        in_order: bool = False,
        group_of: GroupOf = by_role,
        leave_out: Collection[str] = (),
        max_bytes: int = sys.maxsize,
        spill: Path | None = None,
    ) -> None:
        self.estimators = estimators
        self.credits_groups = credits_groups
        self.group_of = group_of
        self.leave_out = frozenset(leave_out)
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self.drop_uniform = drop_uniform
        self.refill = refill
        self.in_order = in_order
        self._running: set[int] = set()
        self._complete: list[CompleteGroup | SpilledGroup] = []
        self._spill = spill
        self._waiting: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None

    def __len__(self) -> int:
        return len(self._complete)

    def close_group(self, assembly: Assembly) -> CompleteGroup | FilterReason:
        """Turns an assembly whose rollouts have all ended into a complete group, or returns why it is filtered."""
        episodes = [assembly.episodes[index] for index in sorted(assembly.episodes)]
        finished = [episode for episode in episodes if episode.trajectories]
        if len(finished) < assembly.expected:
            return FilterReason.INCOMPLETE_GROUP
        wanted = [episode for episode in finished if episode.termination_reason.value not in self.leave_out]
        kept, reason = [], FilterReason.NOTHING_SAMPLED if wanted else FilterReason.TERMINATION_REASON
        version = assembly.dispatched_version
        for group in group_trajectories(
            assembly.ordinal, assembly.task_id, wanted, self.group_of, dispatched_version=version
        ):
            estimator = self.estimators.of(group.role)
            why = filter_reason(
                group,
                min_group_size=estimator.min_group_size,
                drop_uniform=self.drop_uniform,
                learns_written=estimator.learns_written,
            )
            if why is None:
                kept.append(group)
            elif not reason.is_of_policy:
                reason = why
        if not kept and (self.refill or not reason.is_of_policy):
            return reason
        return CompleteGroup(
            ordinal=assembly.ordinal,
            task_id=assembly.task_id,
            epoch=assembly.epoch,
            episodes=finished,
            groups=kept,
            advantages=self.estimators(kept) if self.credits_groups else None,
            left_out=len(finished) - len(wanted),
            dispatched_version=version,
            filtered=None if kept else reason,
        )

    def expect(self, ordinal: int) -> None:
        """Registers a group that was started."""
        self._running.add(ordinal)

    def put(self, group: CompleteGroup) -> None:
        """Adds a complete group, in any order."""
        self._running.discard(group.ordinal)
        bisect.insort(self._complete, group, key=lambda item: item.ordinal)
        self.size_bytes += group.size_bytes
        if self._spill is not None and self.size_bytes > self.max_bytes:
            self._move_newest_to(self._spill)
        self._wake()

    def _move_newest_to(self, folder: Path) -> None:
        """Writes the latest groups to disk until the others fit; one group always stays in memory."""
        for position in range(len(self._complete) - 1, 0, -1):
            group = self._complete[position]
            if isinstance(group, CompleteGroup) and not group.has_media:
                self._complete[position] = SpilledGroup.write(folder, group)
                self.size_bytes -= group.size_bytes
                if self.size_bytes <= self.max_bytes:
                    return

    @property
    def is_full(self) -> bool:
        """Whether the complete groups exceed the memory limit."""
        return self.size_bytes > self.max_bytes

    def drop(self, ordinal: int) -> None:
        """Unregisters a group that will not complete."""
        self._running.discard(ordinal)
        self._wake()

    async def take(self, groups: int) -> list[CompleteGroup]:
        """Waits for ``groups`` complete groups, then removes and returns the oldest.

        Raises:
            BaseException: The error that `fail` was called with.
        """
        while not self._holds(groups) and self._failure is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self._failure is not None:
            raise self._failure
        waiting, self._complete = self._complete[:groups], self._complete[groups:]
        taken = [self._in_memory(group) for group in waiting]
        self.size_bytes -= sum(group.size_bytes for group in waiting if isinstance(group, CompleteGroup))
        return taken

    def _in_memory(self, group: CompleteGroup | SpilledGroup) -> CompleteGroup:
        if not isinstance(group, SpilledGroup):
            return group
        whole = self.restore(group.read())
        group.path.unlink()
        return whole

    def restore(self, line: str | bytes) -> CompleteGroup:
        """Restores a group written by `CompleteGroup.to_json`; grouping, filter and estimator run again.

        Raises:
            ValueError: If the line is invalid, or the group would now be filtered.
        """
        written = json.loads(line)
        episodes = {e.rollout_index: e for e in map(Episode.model_validate, written.pop("episodes"))}
        outcome = self.close_group(Assembly(**written, expected=len(episodes), episodes=episodes))
        if not isinstance(outcome, CompleteGroup):
            raise ValueError(f"group {written['ordinal']} is no longer complete: {outcome.value}")
        return outcome

    def _holds(self, groups: int) -> bool:
        if len(self._complete) < groups:
            return False
        return not self.in_order or self._complete[groups - 1].ordinal < min(self._running, default=sys.maxsize)

    def ordinals(self) -> list[int]:
        """Returns the ordinals of the waiting groups."""
        return [group.ordinal for group in self._complete]

    def discard(self) -> Sequence[CompleteGroup | SpilledGroup]:
        """Empties the buffer and returns its groups."""
        discarded, self._complete = self._complete, []
        self.size_bytes = 0
        return discarded

    def write(self, path: Path) -> list[int]:
        """Writes the complete groups as JSON lines, for a checkpoint.

        Returns:
            Ordinals of the written groups; groups with media are skipped.
        """
        ordinals = []
        with path.open("wb") as file:
            for group in list(self._complete):  # a copy: this runs in a thread while groups are added
                if isinstance(group, SpilledGroup) or not group.has_media:
                    file.write(group.read() if isinstance(group, SpilledGroup) else group.to_json().encode() + b"\n")
                    ordinals.append(group.ordinal)
        return ordinals

    def fail(self, error: BaseException) -> None:
        """Makes every current and later `take` raise ``error``; only the first error counts."""
        self._failure = self._failure or error
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
