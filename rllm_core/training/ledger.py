"""Life cycle of every group: each state change is one method, which counts its rollouts and writes its event.

A group is running, complete, consumed and finally trained. A running group can be filtered instead; its failed rollouts
count as failed. Running and complete groups can be cancelled; they are started again, in this launch or the next. The
consumed groups of an unfinished optimizer step become complete again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllm_core.algorithms.grouping import FilterReason
from rllm_core.backend import OptimizerStep
from rllm_core.run_folder.reporting import Reporter
from rllm_core.training.accounting import Account, Books
from rllm_core.training.buffer import GroupBuffer
from rllm_core.training.group import Group
from rllm_core.training.rollouts import RolloutKey
from rllm_core.training.staleness_limit import SyncCoordinator
from rllm_core.types import Episode


class Ledger:
    """Records what happens to the groups of a run.

    Args:
        per_take: Number of groups that training takes at once; even a full buffer may grow to this number.

    Attributes:
        books: Rollout accounting.
        running: Groups with running rollouts, by ordinal.
        consumed: Groups of the current optimizer step.
        due: Ordinals of cancelled groups, which are started again before new ones.
    """

    def __init__(
        self,
        coordinator: SyncCoordinator,
        buffer: GroupBuffer,
        reporter: Reporter,
        *,
        rollouts_per_group: int,
        per_take: int,
    ) -> None:
        self.coordinator = coordinator
        self.buffer = buffer
        self.books = Books()
        self.running: dict[int, Group] = {}
        self.consumed: list[Group] = []
        self.due: list[int] = []
        self._reporter = reporter
        self._event = reporter.event
        self._rollouts_per_group = rollouts_per_group
        self._per_take = per_take

    # ----------------------------------------------------------------------------------------------------------------
    # Running groups

    def start(self, group: Group) -> None:
        """Records that an admitted group starts."""
        self.coordinator.on_dispatched()
        self.buffer.expect(group.ordinal)
        self.books.dispatch(group.rollouts)
        self._event(
            "dispatch",
            group=group.ordinal,
            task=group.task_id,
            epoch=group.epoch,
            rollouts=group.rollouts,
            weight_version=group.dispatched_version,
        )
        self.running[group.ordinal] = group

    def start_attempt(self, key: RolloutKey) -> None:
        """Records the start of a rollout, or of its next attempt."""
        if key.attempt:
            self.books.retries += 1
        self._reporter.rollout_started(key.rollout_id, key.ordinal, key.index, key.attempt)

    def end_attempt(self, episode: Episode) -> None:
        """Records the end of a rollout's attempt."""
        self.coordinator.touch()
        self._reporter.rollout_finished(episode)

    def skip(self, ordinal: int, task_id: str) -> None:
        """Records that a group is not started because its task is in quarantine."""
        self._event("skip", group=ordinal, task=task_id)
        self.buffer.drop(ordinal)

    def score(self, group: Group, rewards: Mapping[str, float | None], error: str | None) -> None:
        """Records the rewards that the group scorer gave to a running group; None for an unscored rollout."""
        self.coordinator.touch()
        self._reporter.scored(group.ordinal, group.task_id, rewards, error)

    def complete(self, group: Group) -> None:
        """Moves a running group to the buffer."""
        del self.running[group.ordinal]
        self._event(
            "enqueue",
            group=group.ordinal,
            weight_version=group.weight_version,
            left_out=group.left_out,
            filtered=group.filtered,
            trajectories=group.members,
        )
        self.buffer.put(group)
        self.coordinator.on_completed()
        self._throttle()

    def filter(self, group: Group, reason: FilterReason) -> None:
        """Ends a running group that is not trained; its failed rollouts count as failed, the others as filtered."""
        del self.running[group.ordinal]
        failed = Counter(e.termination_reason.value for e in group.episodes if not e.trajectories)
        for failure, rollouts in failed.items():
            self.books.book("failed", failure, rollouts)
        self.books.book("filtered", reason.value, group.rollouts - failed.total())
        self._event("filter", group=group.ordinal, reason=reason.value, failed=dict(failed))
        self.buffer.drop(group.ordinal)
        self.coordinator.on_dropped()

    def cancel_running(self, reason: str) -> None:
        """Cancels all running groups; they become due."""
        cancelled, self.running = sorted(self.running), {}
        for ordinal in cancelled:
            self.buffer.drop(ordinal)
            self.coordinator.on_dropped()
        self._cancel(cancelled, reason)

    # ----------------------------------------------------------------------------------------------------------------
    # Complete and consumed groups

    async def take(self) -> list[Group]:
        """Waits for complete groups and consumes the oldest; see `GroupBuffer.take`."""
        taken = await self.buffer.take(self._per_take)
        self.coordinator.on_consumed(len(taken))
        self._throttle()
        self.consumed += taken
        self._event("consume", groups=_ordinals(taken), weight_version=self.coordinator.weight_version)
        return taken

    def train(self, step: OptimizerStep) -> list[Group]:
        """Ends the consumed groups with their optimizer step, and returns them."""
        trained, self.consumed = self.consumed, []
        for group in trained:
            for account, reason, rollouts in _outcomes(group):
                self.books.book(account, reason, rollouts)
        self._event(
            "step",
            step=step.step,
            groups=_ordinals(trained),
            trajectories=step.trajectories,
            samples=step.samples,
            sampled_tokens=step.sampled_tokens,
        )
        return trained

    def give_back(self) -> None:
        """Returns the groups of an unfinished optimizer step to the buffer."""
        returned, self.consumed = self.consumed, []
        if returned:
            for group in returned:
                self.buffer.put(group)
            self.coordinator.on_returned(len(returned))
            self._event("return", groups=_ordinals(returned))

    def cancel_complete(self, reason: str) -> None:
        """Empties the buffer; its groups become due."""
        cancelled = self.buffer.discard()
        self.coordinator.on_discarded(len(cancelled))
        self._cancel(cancelled, reason)

    def _cancel(self, ordinals: list[int], reason: str) -> None:
        if ordinals:
            self.books.book("cancelled", reason, len(ordinals) * self._rollouts_per_group)
            self._event("cancel", groups=ordinals, reason=reason)
        self.due = sorted({*self.due, *ordinals})

    def _throttle(self) -> None:
        self.coordinator.throttle(self.buffer.is_full and len(self.buffer) >= self._per_take)

    # ----------------------------------------------------------------------------------------------------------------
    # Accounting and checkpoints

    def check(self) -> None:
        """Compares the accounting with the coordinator's count of groups.

        Raises:
            RunError: If a rollout was lost or counted twice.
        """
        self.books.check(self.coordinator.outstanding * self._rollouts_per_group)

    def books_after_restart(self, buffered: Sequence[int]) -> dict[str, Any]:
        """Returns the accounting for the manifest; ``buffered`` are the groups saved in the checkpoint."""
        return self.books.state_after_restart(len(buffered) * self._rollouts_per_group)

    def due_after_restart(self, buffered: Sequence[int]) -> list[int]:
        """Returns the groups that a resumed run has to start again."""
        return sorted({*self.running, *self.due, *self.buffer.ordinals()} - set(buffered))

    def restore(self, books: dict[str, Any], due: Sequence[int], buffer: Path, buffered: Sequence[int]) -> None:
        """Restores the state of a checkpoint.

        The groups in the file ``buffer``, which `GroupBuffer.write` wrote, need not be generated again.

        Raises:
            ValueError: If the file contains other groups.
        """
        self.books.load_state_dict(books)
        self.due = list(due)
        for ordinal in due:  # if groups are trained in order, later ones must wait for these
            self.buffer.expect(ordinal)
        lines = buffer.read_bytes().splitlines() if buffer.exists() else []
        restored = [self.buffer.rules.restore(line) for line in lines]
        if _ordinals(restored) != buffered:
            raise ValueError(f"{buffer} does not contain the groups {buffered}")
        for group in restored:
            self.buffer.put(group)
        self.coordinator.on_restored(len(restored))


def _ordinals(groups: Sequence[Group]) -> list[int]:
    return [group.ordinal for group in groups]


def _outcomes(group: Group) -> list[tuple[Account, str, int]]:
    """Returns outcome, reason and number of a consumed group's rollouts."""
    if group.filtered is not None:
        return [("filtered", group.filtered.value, group.rollouts)]
    return [
        ("trained", "trained", group.rollouts - group.left_out - len(group.unscored)),
        ("filtered", FilterReason.TERMINATION_REASON.value, group.left_out),
        ("filtered", FilterReason.UNSCORED.value, len(group.unscored)),
    ]
