"""Generation: starts whole groups, and records the outcome of every rollout that is not trained."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rllm_core.algorithms.grouping import FilterReason
from rllm_core.assembly.tasks import TaskStream
from rllm_core.config import RunConfig
from rllm_core.errors import RunError, UserError
from rllm_core.events import TrainerState
from rllm_core.limits.timeouts import stop
from rllm_core.observers import Observers
from rllm_core.run_folder.difficulty import Difficulty
from rllm_core.run_folder.reporting import Reporter
from rllm_core.training.books import Books
from rllm_core.training.buffer import Assembly, CompleteGroup, TrajectoryGroupBuffer
from rllm_core.training.coordinator import SyncCoordinator
from rllm_core.training.failures import CircuitBreaker, Quarantine
from rllm_core.training.rollouts import RolloutKey, RolloutRunner
from rllm_core.types import Episode, Task

# Thousands of rollouts started in one tick would block the event loop for a second, and again when an engine answers
# them together. The limit is still high, for engines that batch the requests of a tick.
MAX_ROLLOUTS_PER_TICK = 128


class Generation:
    """Starts groups of the task stream when the coordinator admits them.

    Args:
        state: Returns a snapshot for hooks.
        incarnation: Launch number, part of rollout ids.
        groups_per_take: Complete groups that training waits for; even a full buffer may grow to this number.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        runner: RolloutRunner,
        stream: TaskStream,
        coordinator: SyncCoordinator,
        buffer: TrajectoryGroupBuffer,
        books: Books,
        reporter: Reporter,
        observers: Observers,
        state: Callable[[], TrainerState],
        incarnation: int,
        groups_per_take: int,
    ) -> None:
        self.config = config
        self.runner = runner
        self.stream = stream
        self.coordinator = coordinator
        self.buffer = buffer
        self.books = books
        self.reporter = reporter
        self.observers = observers
        self.epoch = -1
        self.groups_since_step = 0
        self.difficulty = Difficulty()
        self.quarantine = Quarantine(config.rollout.quarantine_after_groups)
        self._breaker = CircuitBreaker(config.rollout)
        self._state = state
        self._incarnation = incarnation
        self._groups_per_take = groups_per_take
        self._next_ordinal = 0
        self._again: list[int] = []  # cancelled earlier, or in flight at the resumed checkpoint
        self._groups: dict[int, asyncio.Task[None]] = {}
        self._assemblies: dict[int, Assembly] = {}

    async def run(self) -> None:
        """Starts groups until the run needs no more."""
        rollouts_in_tick = 0
        while await self.coordinator.admit():
            ordinal = self._again[0] if self._again else self._next_ordinal
            epoch = self.stream.epoch(ordinal)
            if epoch > self.epoch:
                self.epoch = epoch
                await self.observers.notify("on_epoch_start", state=self._state(), epoch=epoch)
                continue  # a weight sync may have started during the hooks
            if self._again:
                self._again.pop(0)
            else:
                self._next_ordinal += 1
            if self.stream[ordinal].task_id in self.quarantine:
                self._skip(ordinal)
                await asyncio.sleep(0)  # admit() does not yield to other tasks if it need not wait
            else:
                self._check_attempts()
                self._dispatch(ordinal)
                rollouts_in_tick += self.config.training.rollouts_per_group
                if rollouts_in_tick >= MAX_ROLLOUTS_PER_TICK and not self.runner.merger.lockstep:
                    rollouts_in_tick = 0
                    await asyncio.sleep(0)
            if self.stream.position(ordinal) == len(self.stream.tasks) - 1:
                await self.observers.notify("on_epoch_end", state=self._state(), epoch=epoch)

    async def stop(self, reason: str) -> None:
        """Stops all groups in flight and counts them as cancelled; they stay due."""
        running, ordinals = list(self._groups.values()), sorted(self._assemblies)
        await stop(*running)
        for ordinal in ordinals:
            self.buffer.drop(ordinal)
            self.coordinator.on_dropped()
        self._give_up(ordinals, reason)
        self._groups, self._assemblies = {}, {}

    def give_back(self, taken: Sequence[CompleteGroup]) -> None:
        """Returns the groups of an unfinished optimizer step to the buffer."""
        if not taken:
            return
        for group in taken:
            self.buffer.put(group)
        self.coordinator.on_returned(len(taken))
        self.reporter.event("return", groups=[group.ordinal for group in taken])

    def discard(self, reason: str) -> None:
        """Empties the buffer and counts its groups as cancelled; they stay due."""
        discarded = [group.ordinal for group in self.buffer.discard()]
        self.coordinator.on_discarded(len(discarded))
        self._give_up(discarded, reason)

    def _give_up(self, ordinals: list[int], reason: str) -> None:
        if ordinals:
            self.books.book("cancelled", reason, len(ordinals) * self.config.training.rollouts_per_group)
            self.reporter.event("cancel", groups=ordinals, reason=reason)
        self._again = sorted({*self._again, *ordinals})

    def restore_buffer(self, path: Path, state: dict[str, Any]) -> None:
        """Reads the groups written by `TrajectoryGroupBuffer.write`, so they need not be generated again.

        Raises:
            ValueError: If they differ from those in ``state``, from the manifest.
        """
        restored = [self.buffer.restore(line) for line in path.read_bytes().splitlines()] if path.exists() else []
        if [group.ordinal for group in restored] != state["buffered_ordinals"]:
            raise ValueError(f"{path} does not contain the groups {state['buffered_ordinals']}")
        for group in restored:
            self.buffer.put(group)
        self.coordinator.on_restored(len(restored))

    def whereabouts(self) -> str:
        """Describes where every rollout is, for the message of a stalled run."""
        missing = [
            f"group {a.ordinal} (task {a.task_id}) waits for rollouts "
            + ", ".join(str(index) for index in range(a.expected) if index not in a.episodes)
            for a in list(self._assemblies.values())[:20]
        ]
        coordinator = self.coordinator
        return (
            f"{coordinator.in_flight} groups in flight, {coordinator.buffered} complete, {coordinator.consumed} "
            "consumed; " + ("; ".join([*missing, self.runner.whereabouts()]) if missing else "no rollout is running")
        )

    def state_dict(self, buffered_ordinals: list[int]) -> dict[str, Any]:
        """Returns the state for the manifest; ``buffered_ordinals`` are the groups saved in the checkpoint."""
        return {
            "next_ordinal": self._next_ordinal,
            "due_ordinals": sorted({*self._assemblies, *self._again, *self.buffer.ordinals()} - set(buffered_ordinals)),
            "buffered_ordinals": buffered_ordinals,
            "epoch": self.epoch,
            "quarantine": self.quarantine.state_dict(),
            "difficulty": self.difficulty.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from the manifest; due groups are started first."""
        self._next_ordinal = state["next_ordinal"]
        self._again = list(state["due_ordinals"])
        for ordinal in self._again:  # with in_order, later groups must wait for these
            self.buffer.expect(ordinal)
        self.epoch = state["epoch"]
        self.quarantine.load_state_dict(state["quarantine"])
        self.difficulty.load_state_dict(state.get("difficulty", {}))  # missing in manifests of earlier versions

    def _skip(self, ordinal: int) -> None:
        task_id = self.stream[ordinal].task_id
        if len(self.quarantine.tasks) == len({task.task_id for task in self.stream.tasks}):
            error, _, _ = self.quarantine.tasks[task_id].partition("\n")
            raise RunError(
                f"every task is in quarantine, so nothing is left to train on; {task_id!r} last failed with: {error}"
            )
        self.reporter.event("skip", group=ordinal, task=task_id)
        self.buffer.drop(ordinal)

    def _check_attempts(self) -> None:
        self.groups_since_step += 1
        limit = self.config.algorithm.max_group_attempts * self.config.window_quota
        if self.groups_since_step > limit:
            raise RunError(
                f"one optimizer step needed more than {limit} groups because too many were filtered (run so far: "
                f"{self.books.by_reason()}). Try easier or harder tasks, algorithm.filter_uniform_groups = false, or a "
                "larger algorithm.max_group_attempts"
            )

    def _dispatch(self, ordinal: int) -> None:
        task, size = self.stream[ordinal], self.config.training.rollouts_per_group
        self.coordinator.on_dispatched()
        self.buffer.expect(ordinal)
        self.books.dispatch(size)
        version, epoch = self.coordinator.weight_version, self.stream.epoch(ordinal)
        self.reporter.event(
            "dispatch", group=ordinal, task=task.task_id, epoch=epoch, rollouts=size, weight_version=version
        )
        assembly = Assembly(ordinal, task.task_id, epoch, size, dispatched_version=version)
        self._assemblies[ordinal] = assembly
        self._groups[ordinal] = asyncio.create_task(self._play_group(task, assembly), name=f"group {ordinal}")
        self._groups[ordinal].add_done_callback(self._group_ended)

    def _group_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):  # from the task group; later errors follow from the first
            error = error.exceptions[0]
        if error is not None:
            self.buffer.fail(error)

    async def _play_group(self, task: Task, assembly: Assembly) -> None:
        """Runs all rollouts of one task, then buffers the group or records its outcome."""
        async with asyncio.TaskGroup() as rollouts:
            for index in range(assembly.expected):
                rollouts.create_task(self._play_rollout(task, assembly, index))
        outcome = self.buffer.close_group(assembly)
        del self._assemblies[assembly.ordinal], self._groups[assembly.ordinal]
        if outcome is not FilterReason.INCOMPLETE_GROUP:
            self.quarantine.group_played(assembly.task_id)
        if isinstance(outcome, CompleteGroup):
            self.reporter.event(
                "enqueue",
                group=assembly.ordinal,
                weight_version=outcome.weight_version,
                left_out=outcome.left_out,
                filtered=outcome.filtered,
                trajectories=outcome.members,
            )
            self.buffer.put(outcome)
            self.coordinator.on_completed()
            self.coordinator.throttle(self.buffer.is_full and len(self.buffer) >= self._groups_per_take)
            return
        failed = Counter(e.termination_reason.value for e in assembly.episodes.values() if not e.trajectories)
        for reason, count in failed.items():
            self.books.book("failed", reason, count)
        self.books.book("filtered", outcome.value, assembly.expected - failed.total())
        self.reporter.event("filter", group=assembly.ordinal, reason=outcome.value, failed=dict(failed))
        if outcome is FilterReason.INCOMPLETE_GROUP:
            self._group_lost(assembly)
        else:
            self.difficulty.filtered(assembly.episodes.values())
        self.buffer.drop(assembly.ordinal)
        self.coordinator.on_dropped()

    def _group_lost(self, assembly: Assembly) -> None:
        failed = [episode for episode in assembly.episodes.values() if episode.error is not None]
        error = (failed[-1].error if failed else None) or "no trajectory"
        if failed and (trace := failed[-1].metadata.get("traceback")):
            error = f"{error}\n{trace}"
        if self.quarantine.group_lost(assembly.task_id, error):
            self.reporter.event("quarantine", task=assembly.task_id, error=error)

    async def _play_rollout(self, task: Task, assembly: Assembly, index: int) -> None:
        key = RolloutKey("train", assembly.ordinal, index, 0, self._incarnation)
        try:
            rollout = await self.runner.run(task, key, started=self._started, ended=self._ended)
        except UserError as error:
            self.buffer.fail(error)
            raise
        assembly.add(rollout.episode)

    def _started(self, key: RolloutKey) -> None:
        if key.attempt:
            self.books.retries += 1
        self.reporter.rollout_started(key)

    async def _ended(self, episode: Episode) -> None:
        self.coordinator.touch()
        self.reporter.rollout_finished(episode)
        if (outage := self._breaker.record(episode)) is not None:
            self.buffer.fail(outage)
        if self.observers.active("on_episode_finished"):
            await self.observers.notify("on_episode_finished", state=self._state(), episode=episode)
