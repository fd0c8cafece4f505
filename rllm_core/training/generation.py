"""Generation: starts whole groups, runs their rollouts, and deals with failures."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from rllm_core.algorithms.grouping import FilterReason, why_untrained
from rllm_core.costs import Tally, collecting
from rllm_core.errors import RunError, UserError
from rllm_core.limits.timeouts import stop
from rllm_core.run_folder.difficulty import DifficultyCounts
from rllm_core.training.failures import CircuitBreaker, Quarantine
from rllm_core.training.group import Group
from rllm_core.training.rollouts import RolloutKey
from rllm_core.training.run_parts import RunParts
from rllm_core.training.stopping import BudgetSpent
from rllm_core.types import Episode, Task

# Thousands of rollouts started in one tick would block the event loop for a second, and again when an engine answers
# them together. The limit is still high, for engines that batch the requests of a tick.
MAX_ROLLOUTS_PER_TICK = 128
MAX_SKIPS = 100_000


class Generation:
    """Starts groups of the task stream when the coordinator admits them.

    Attributes:
        groups_since_step: Groups started since the last optimizer step.
    """

    def __init__(self, parts: RunParts) -> None:
        self.parts = parts
        self.config = parts.config
        self.runner = parts.runner
        self.ledger = parts.ledger
        self.coordinator = parts.coordinator
        self.stream = parts.stream
        self.groups_since_step = 0
        self._ended_before_step: Counter[str] = Counter()
        self.difficulty = DifficultyCounts()
        self.quarantine = Quarantine(parts.config.rollout.quarantine_after_groups)
        self._breaker = CircuitBreaker(parts.config.rollout)
        self._next_ordinal = 0
        self._groups: dict[int, asyncio.Task[None]] = {}
        self.runner.merger.is_starting = self._is_starting

    async def run(self) -> None:
        """Starts groups until the run needs no more."""
        rollouts_in_tick, skipped, position = 0, 0, self.parts.position
        while await self.coordinator.admit():
            if not self.parts.budget.fits(self.config.training.rollouts_per_group):
                if await self.parts.budget.waited():
                    continue
                self.parts.buffer.close(BudgetSpent(self.parts.budget.problem()))
                return
            due = self.ledger.due
            ordinal = due[0] if due else self._next_ordinal
            epoch = self.stream.epoch(ordinal)
            if epoch > position.epoch:
                position.epoch = epoch
                await self.parts.notify("on_epoch_start", epoch=epoch)
                continue  # a weight sync may have started during the hooks
            if due:
                del due[0]
            else:
                self._next_ordinal += 1
            task = self.stream.draw(ordinal, self.coordinator.space)
            if task.task_id in self.quarantine:
                self._skip(ordinal, task.task_id)
                skipped += 1
                self._check_skips(skipped)
                await asyncio.sleep(0)  # admit() does not yield to other tasks if it need not wait
            else:
                skipped = 0
                self._check_attempts()
                self._start(ordinal, task)
                rollouts_in_tick += self.config.training.rollouts_per_group
                if rollouts_in_tick >= MAX_ROLLOUTS_PER_TICK and not self.runner.merger.lockstep:
                    rollouts_in_tick = 0
                    await asyncio.sleep(0)
            if self.stream.ends_epoch(ordinal):
                await self.parts.notify("on_epoch_end", epoch=epoch)

    async def stop(self, reason: str) -> None:
        """Stops and cancels all groups in flight."""
        await stop(*self._groups.values())
        self._groups = {}
        self.ledger.cancel_running(reason)

    def whereabouts(self) -> str:
        """Describes where every rollout is, for the message of a stalled run."""
        missing = [
            f"group {group.ordinal} (task {group.task_id}) waits for "
            + (f"rollouts {', '.join(map(str, group.running))}" if group.running else "its scores")
            for group in list(self.ledger.running.values())[:20]
        ]
        flow = self.coordinator
        counts = f"{flow.in_flight} groups in flight, {flow.buffered} complete, {flow.consumed} consumed"
        return "; ".join([counts, *missing, self.runner.whereabouts()])

    def state_dict(self, buffered: list[int]) -> dict[str, Any]:
        """Returns the state for the manifest; ``buffered`` are the groups saved in the checkpoint."""
        return {
            "next_ordinal": self._next_ordinal,
            "due_ordinals": self.ledger.due_after_restart(buffered),
            "buffered_ordinals": buffered,
            "epoch": self.parts.position.epoch,
            "draws": self.stream.state_dict(),
            "quarantine": self.quarantine.state_dict(),
            "difficulty": self.difficulty.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from the manifest, except for the ledger and the position."""
        self._next_ordinal = state["next_ordinal"]
        self.stream.load_state_dict(state["draws"])
        self.quarantine.load_state_dict(state["quarantine"])
        self.difficulty.load_state_dict(state.get("difficulty", {}))  # missing in manifests of earlier versions

    def _skip(self, ordinal: int, task_id: str) -> None:
        if len(self.quarantine.tasks) >= len(self.stream.tasks):
            error, _, _ = self.quarantine.tasks[task_id].partition("\n")
            raise RunError(
                f"every task is in quarantine, so nothing is left to train on; {task_id!r} last failed with: {error}"
            )
        self.ledger.skip(ordinal, task_id)
        version, step = self.coordinator.weight_version, self.parts.position.step
        self.stream.skipped(ordinal, weight_version=version, step=step)

    def _check_skips(self, in_a_row: int) -> None:
        if in_a_row > min(2 * len(self.stream.tasks), MAX_SKIPS):
            raise RunError(
                f"training.sampler = {self.config.training.sampler!r} chose only quarantined tasks, {in_a_row} in a "
                f"row, although {len(self.quarantine.tasks)} of {len(self.stream.tasks)} tasks are; choose another"
            )

    def _check_attempts(self) -> None:
        books = self.ledger.books
        ended = Counter({**books.by_reason().get("filtered", {}), "failed": books.total("failed")})
        if not self.groups_since_step:
            self._ended_before_step = ended
        self.groups_since_step += 1
        limit = self.config.algorithm.max_group_attempts * self.config.window_quota
        if self.groups_since_step > limit:
            why, fix = why_untrained(ended - self._ended_before_step)
            raise RunError(
                f"one optimizer step needed more than {limit} groups because {why} (run so far: {books.described()}). "
                f"{fix}, or set a larger algorithm.max_group_attempts"
            )

    def _start(self, ordinal: int, task: Task) -> None:
        rollouts, version = self.config.training.rollouts_per_group, self.coordinator.weight_version
        group = Group(ordinal, task.task_id, self.stream.epoch(ordinal), rollouts, dispatched_version=version)
        self.ledger.start(group)
        self.parts.budget.start(rollouts)
        self._groups[ordinal] = asyncio.create_task(self._play_group(task, group), name=f"group {ordinal}")
        self._groups[ordinal].add_done_callback(self._group_ended)

    def _group_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):  # from the task group; later errors follow from the first
            error = error.exceptions[0]
        if error is not None:
            self.parts.buffer.fail(error)
        self.runner.merger.settled()

    def _is_starting(self) -> bool:
        """Whether rollouts are about to start, such as those of a group in the place of a filtered one."""
        running = [len(group.running) for group in self.ledger.running.values()]
        if running and self.coordinator.may_dispatch():
            return self.parts.budget.fits(self.config.training.rollouts_per_group)
        return sum(running) > self.runner.slots.wanted or (self.parts.scoring is None and not all(running))

    async def _play_group(self, task: Task, group: Group) -> None:
        """Runs all rollouts of one task, then completes or filters the group."""
        with collecting(Tally(self.parts.costs)) as tally:
            try:
                await self._play_and_score(task, group)
            finally:
                self.parts.budget.end(group.rollouts, tally)
        reason = self.parts.buffer.rules.close(group)
        del self._groups[group.ordinal]
        if reason is not FilterReason.INCOMPLETE_GROUP:
            self.quarantine.group_played(group.task_id)
        if reason is None:
            self.ledger.complete(group)
            return
        self.ledger.filter(group, reason)
        self.parts.recording.filtered(group, reason, step=self.parts.position.step)
        is_lost = reason is FilterReason.INCOMPLETE_GROUP
        self.stream.ended(group, "failed" if is_lost else "filtered", reason.value)
        if is_lost:
            self._group_lost(group)
        else:
            self.difficulty.filtered(group.episodes)

    async def _play_and_score(self, task: Task, group: Group) -> None:
        async with asyncio.TaskGroup() as rollouts:
            for index in range(group.rollouts):
                rollouts.create_task(self._play_rollout(task, group, index))
        if self.parts.scoring is not None and group.is_whole:
            scored = await self.parts.scoring.score(task, group.episodes, "train", group.ordinal)
            group.score(scored.episodes, scored.rewards)
            self.ledger.score(group, scored.rewards, scored.error)

    def _group_lost(self, group: Group) -> None:
        failed = [episode for episode in group.ended.values() if episode.error is not None]
        error = (failed[-1].error if failed else None) or "no trajectory"
        if failed and (trace := failed[-1].metadata.get("traceback")):
            error = f"{error}\n{trace}"
        if self.quarantine.group_lost(group.task_id, error):
            self.parts.reporter.event("quarantine", task=group.task_id, error=error)

    async def _play_rollout(self, task: Task, group: Group, index: int) -> None:
        key = RolloutKey("train", group.ordinal, index, 0, self.parts.run_dir.incarnation)
        try:
            rollout = await self.runner.run(task, key, started=self.ledger.start_attempt, ended=self._attempt_ended)
        except UserError as error:
            self.parts.buffer.fail(error)
            raise
        group.add(rollout.episode, rollout.calls)

    async def _attempt_ended(self, episode: Episode) -> None:
        self.ledger.end_attempt(episode)
        if (outage := self._breaker.record(episode)) is not None:
            self.parts.buffer.fail(outage)
        if self.parts.observers.active("on_episode_finished"):
            await self.parts.notify("on_episode_finished", episode=episode)
