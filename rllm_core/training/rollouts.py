"""Runs a workflow on a task, and turns every result or error into an episode with a reason."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rllm_core.algorithms.advantages import RoleEstimators
from rllm_core.config import RunConfig
from rllm_core.costs import REWARDS, SAMPLING, TOOLS, Tally, collecting, current
from rllm_core.engine import Completer, RolloutEngine, TITOCompleter, TokenSource
from rllm_core.hosts.contract import Place, RolloutHost
from rllm_core.hosts.rollout_failures import awaited, ends_run, failure_of
from rllm_core.limits.shared_timer import SharedTimer
from rllm_core.limits.slots import Slots
from rllm_core.limits.timeouts import stop, waiting_at, whereabouts
from rllm_core.scope import CallTimes, RolloutScope, timing
from rllm_core.seeds import derive_seed
from rllm_core.training.acceptance import accept, name_of
from rllm_core.training.garbage import YoungGarbage
from rllm_core.training.requests import RequestMerger
from rllm_core.types import Episode, SamplingParams, Task, TerminationReason, Trajectory, freeze

if TYPE_CHECKING:
    from rllm_core.distillation.teacher import Teacher

OF_CALLS = {"model": SAMPLING, "tool": TOOLS, "reward": REWARDS}
"""Kind of cost of each kind of call."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutKey:
    """Identity of a rollout attempt. Its seeds derive from all fields except `incarnation`, so a retry samples again.

    Attributes:
        purpose: ``train``, ``validation`` or ``eval``.
        ordinal: Position of the task in the stream (or in the list of validation tasks).
        index: Number of the rollout among the rollouts of this task.
        attempt: 0, plus one per retry.
        incarnation: Number of the launch, or of the validated step; makes ids unique, but does not affect seeds.
    """

    purpose: str
    ordinal: int
    index: int
    attempt: int = 0
    incarnation: int = 0

    @property
    def rollout_id(self) -> str:
        """Opaque id, unique in a run folder."""
        return f"{self.purpose}-{self.incarnation}-{self.ordinal}-{self.index}-{self.attempt}"

    def seed(self, run_seed: int) -> int:
        """Derives the rollout's seed from the run's."""
        return derive_seed(run_seed, self.purpose, self.ordinal, self.index, self.attempt)


@dataclass(slots=True)
class Rollout:
    """A rollout that has ended, or one attempt at it.

    Attributes:
        episode: Episode of the last attempt.
        is_final: Whether a retry would fail in the same way.
        calls: Durations of the last attempt's calls, if known.
        failed: Episodes of earlier attempts.
    """

    episode: Episode
    is_final: bool = False
    calls: CallTimes | None = None
    failed: tuple[Episode, ...] = ()


class RolloutRunner:
    """Runs a workflow on tasks. The completers, forks and requests of a rollout end with it.

    Args:
        lockstep: See `RequestMerger`.
        estimators: Advantage estimators by group name (`Workflow.group_of`). They determine whether trajectories need
            rewards and a teacher; without estimators, all trajectories do.
        teacher: Teacher that scores successful training rollouts, or None.
        garbage: See `RequestMerger`.
    """

    def __init__(
        self,
        host: RolloutHost,
        engine: RolloutEngine,
        config: RunConfig,
        *,
        lockstep: bool,
        estimators: RoleEstimators | None = None,
        teacher: Teacher | None = None,
        garbage: YoungGarbage | None = None,
    ) -> None:
        self.host = host
        self.workflow = host.hosted.workflow
        self.engine = engine
        self.config = config
        self._estimators = estimators
        self._teacher = teacher
        self.merger = RequestMerger(
            engine,
            config.rollout,
            lockstep=lockstep,
            is_settled=lambda: host.is_settled,
            outside=self._outside,
            garbage=garbage,
        )
        most = config.rollout.max_concurrent_rollouts
        self.slots = Slots(min(most, host.capacity or most))
        self._timer = SharedTimer(config.rollout.rollout_timeout_seconds)
        self._pid = os.getpid()
        self._calls: set[CallTimes] = set()  # of rollouts in this process
        self._running: set[asyncio.Task[Episode]] = set()  # including those that ignored their cancellation
        self._lingering: set[RolloutScope] = set()  # scopes of ended rollouts that still have requests in the engine
        self._settled = asyncio.Event()  # set when no scope is lingering any more
        self._train_params = self._params(config.rollout.temperature, config.rollout.top_p, config.rollout.top_k)
        self._validation_params = self._params(config.rollout.validation_temperature, 1.0, 0)

    def _params(self, temperature: float, top_p: float, top_k: int) -> SamplingParams:
        stop = self.engine.parser.get_stop_token_ids() if self.engine.parser is not None else ()
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_response_tokens=self.config.rollout.max_response_tokens,
            stop_token_ids=tuple(stop),
        )

    async def run(
        self,
        task: Task,
        key: RolloutKey,
        *,
        started: Callable[[RolloutKey], None] = lambda key: None,
        ended: Callable[[Episode], Awaitable[None]] | None = None,
    ) -> Rollout:
        """Runs the workflow on a task, with up to ``rollout.max_attempts`` attempts if a retry can help.

        ``key`` is that of the first attempt. ``started`` is called before every attempt, ``ended`` awaited after it.

        Raises:
            UserError: If only the user can fix the problem, so that a retry is useless.
        """
        failed: tuple[Episode, ...] = ()
        while True:
            started(key)
            attempt = await self.attempt(task, key)
            if ended is not None:
                await ended(attempt.episode)
            may_retry = key.attempt + 1 < self.config.rollout.max_attempts and not attempt.is_final
            if not attempt.episode.termination_reason.is_failure or not may_retry:
                attempt.failed = failed
                return attempt
            failed += (attempt.episode,)
            key = replace(key, attempt=key.attempt + 1)

    async def attempt(self, task: Task, key: RolloutKey) -> Rollout:
        """Runs one attempt; errors of the workflow or the engine become the episode's termination reason."""
        calls, tally = CallTimes(), Tally(current())
        try:
            with collecting(tally):
                return await self._attempt(task, key, calls, tally)
        finally:
            for of_call in dict.fromkeys([call.kind for call in calls.calls]):
                seconds = [call.seconds for call in calls.calls if call.kind == of_call]
                kind = OF_CALLS.get(of_call, of_call)
                tally.add(kind, 0 if kind == SAMPLING else len(seconds), seconds=sum(seconds))  # completers count those
            tally.close(rollout=key.rollout_id)

    async def _attempt(self, task: Task, key: RolloutKey, calls: CallTimes, tally: Tally) -> Rollout:
        is_validation = key.purpose != "train"
        async with self.slots.place(priority=is_validation), self.host.place() as place:
            self.merger.rollout_started()
            self._calls.add(calls)
            try:
                attempt = await self._limited(place, task, key, is_validation, calls, tally)
            finally:
                self._calls.discard(calls)
                self.merger.rollout_ended()
            episode = attempt.episode
            if self._teacher is not None and not is_validation and not episode.termination_reason.is_failure:
                episode = await self._scored(self._teacher, task, episode)
        # The record was validated a moment ago, so adding its identity needs no second validation.
        identity = {"rollout_id": key.rollout_id, "rollout_index": key.index, "is_validation": is_validation}
        if type(episode) is Episode:
            attempt.episode = Episode._of(episode.__dict__ | identity, episode.__pydantic_fields_set__)
        else:  # a plugin's subclass may have state besides its fields
            attempt.episode = episode.model_copy(update=identity)
        attempt.calls = calls
        return attempt

    async def idle(self) -> None:
        """Waits until no requests from ended rollouts remain in the engine."""
        while self._lingering:
            self._settled.clear()
            await self._settled.wait()
        await self.merger.idle()

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[TokenSource]:
        """Holds a slot for requests that belong to no rollout, and yields a token source for them."""
        async with self.slots.place(priority=True):
            self.merger.rollout_started()
            try:
                yield self.merger.source()
            finally:
                self.merger.rollout_ended()

    def _outside(self) -> int:
        """Returns how many calls to tools and reward functions are in progress."""
        return self.host.outside + sum(calls.in_progress for calls in self._calls)

    def whereabouts(self) -> str:
        """Describes where a few rollouts and requests wait."""
        waiting = [whereabouts(self._running, shown=5), whereabouts(self.merger.running_calls)]
        lingering = f"requests of {len(self._lingering)} ended rollouts are in the engine" if self._lingering else ""
        return "; ".join(filter(None, [*waiting, lingering])) or "no rollout is running"

    async def aclose(self) -> None:
        """Cancels requests that are still in the engine."""
        await self.merger.aclose()

    async def _limited(
        self, place: Place, task: Task, key: RolloutKey, is_validation: bool, calls: CallTimes, tally: Tally
    ) -> Rollout:
        """Runs one attempt with a timeout, even if the workflow ignores its cancellation."""
        loop = asyncio.get_running_loop()
        scope = RolloutScope(f"rollout {key.rollout_id}", loop, self._idle_scope, tally)
        # A separate task can be abandoned if it ignores its cancellation.
        work = loop.create_task(
            self._work(place, task, self._completer(key, is_validation, scope), scope, calls),
            name=f"rollout {key.rollout_id} of task {task.task_id!r}",
        )
        over: asyncio.Future[None] = loop.create_future()
        self._running.add(work)

        def end(work: asyncio.Task[Episode]) -> None:
            self._running.discard(work)
            if not over.done():
                over.set_result(None)

        work.add_done_callback(end)
        try:
            with self._timer.deadline():
                await over
        except TimeoutError:
            if not work.done():  # it may have ended just before the timeout
                return await self._late(task, work, scope)
        except asyncio.CancelledError:
            await self._end(work, scope)
            raise
        finally:
            scope.close()
            if scope.is_busy:
                self._lingering.add(scope)
        return self._outcome(task, work)

    async def _work(
        self, place: Place, task: Task, completer: Completer, scope: RolloutScope, calls: CallTimes
    ) -> Episode:
        try:
            # Accept (copy) immediately, so that later changes by the workflow cannot affect the run.
            with timing(calls):
                returned = await awaited(place.run(task, completer))
            return accept(returned, task, self.workflow, scope, self._needs_reward)
        finally:
            scope.answers.clear()  # of many rollouts that end at once, before `_limited` continues for any of them
            if os.getpid() != self._pid:
                # A forked child that continues here would write the parent's files a second time.
                os.write(2, f"a process forked by workflow {name_of(self.workflow)!r} left run(); killed\n".encode())
                os._exit(1)

    async def _end(self, work: asyncio.Task[Episode], scope: RolloutScope) -> bool:
        """Cancels a rollout; returns False if it ignores the cancellation and keeps running."""
        work.cancel()
        scope.close(but=work)
        return not await stop(work)

    async def _late(self, task: Task, work: asyncio.Task[Episode], scope: RolloutScope) -> Rollout:
        waited_at, whom = waiting_at(work), f" for engine {self.engine.name!r}" if scope.is_busy else ""
        has_ended = await self._end(work, scope)
        waited_at = scope.waits_at or waited_at
        late = f"the rollout took longer than {self._timer.seconds:g} s"
        if waited_at:
            late += f"; it waited at {waited_at}{whom}"
        if not has_ended:
            late += (
                ", ignored its cancellation and is still running; let asyncio.CancelledError propagate: catch "
                "Exception, not BaseException"
            )
        return Rollout(self._failed(task, TerminationReason.TIMEOUT, late))

    def _idle_scope(self, scope: RolloutScope) -> None:
        self._lingering.discard(scope)
        if not self._lingering:
            self._settled.set()

    def _outcome(self, task: Task, work: asyncio.Task[Episode]) -> Rollout:
        """Converts the result of a rollout that ended on its own."""
        if work.cancelled():  # not by this class: something it awaited was cancelled
            return Rollout(self._failed(task, TerminationReason.CANCELLED, "the workflow was cancelled from within"))
        try:
            episode = work.result()
        except Exception as error:  # any error of the workflow's code is reported
            if ends_run(error):
                raise
            return self._failure(task, error)
        if episode.termination_reason.is_failure:
            return Rollout(self._failed(task, episode.termination_reason, episode.error or "reported by the workflow"))
        if not episode.trajectories:
            why = "the episode has no trajectory: no call to the model is in it"
            return Rollout(self._failed(task, episode.termination_reason, why))
        return Rollout(episode)

    async def _scored(self, teacher: Teacher, task: Task, episode: Episode) -> Episode:
        """Lets the teacher score the episode; if that fails, the attempt has failed."""
        try:
            return await teacher.score(episode, self._needs_teacher)
        except Exception as error:  # third-party engine, parser and tokenizer
            if ends_run(error):
                raise
            return self._failure(task, error).episode

    def _needs_teacher(self, episode: Episode, trajectory: Trajectory) -> bool:
        group = self.workflow.group_of(episode, trajectory)
        return self._estimators is None or self._estimators.of(group).needs_teacher

    def _needs_reward(self, group: str) -> bool:
        if self.config.algorithm.group_scorer:
            return False  # the scorer sets it later
        return self._estimators is None or self._estimators.of(group).needs_rewards

    def _failure(self, task: Task, error: Exception) -> Rollout:
        """Describes a rollout that raised ``error``."""
        failed = failure_of(error)
        episode = self._failed(task, failed.reason, str(failed))
        if failed.traceback:
            episode.metadata = freeze({"traceback": failed.traceback})
            logger.debug("task %s: %s", task.task_id, failed.traceback)
        return Rollout(episode, is_final=failed.is_final)

    @staticmethod
    def _failed(task: Task, reason: TerminationReason, error: str) -> Episode:
        return Episode(task_id=task.task_id, termination_reason=reason, error=error)

    def _completer(self, key: RolloutKey, is_validation: bool, scope: RolloutScope) -> Completer:
        options: dict[str, Any] = {
            "sampling_params": self._validation_params if is_validation else self._train_params,
            "seed": key.seed(self.config.training.seed),
            "is_validation": is_validation,
            "max_prompt_tokens": self.config.rollout.max_prompt_tokens,
            "scope": scope,
        }
        if not self.engine.supports_token_in_token_out or self.engine.parser is None:
            return Completer(self.engine, **options)
        options["on_segment_break"] = self.config.rollout.on_segment_break
        source = self.merger.source()
        later_source = source if self.merger.lockstep else self.merger.unmerged
        return TITOCompleter(self.engine, source=source, later_source=later_source, **options)
