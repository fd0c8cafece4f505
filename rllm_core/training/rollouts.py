"""Runs a workflow on a task and turns whatever happens into an episode with a reason."""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pydantic import ValidationError

from rllm_core.blame import blamed
from rllm_core.config import RunConfig
from rllm_core.engine import Completer, EngineError, RolloutEngine, Terminated, TITOCompleter, derive_seed
from rllm_core.errors import RefusedConversation, UserError
from rllm_core.observers import Observers
from rllm_core.scope import RolloutScope
from rllm_core.training.acceptance import Refused, accept
from rllm_core.training.deadlines import Escaped, contained, stop, waiting_at, whereabouts
from rllm_core.training.requests import RequestMerger
from rllm_core.training.shared_timer import SharedTimer
from rllm_core.training.slots import Slots
from rllm_core.types import Episode, SamplingParams, Step, Task, TerminationReason, Trajectory, freeze, well_formed
from rllm_core.workflow import Workflow

if TYPE_CHECKING:
    from rllm_core.distillation.teacher import Teacher

logger = logging.getLogger(__name__)

MAX_TRACEBACK_CHARACTERS = 8000


@dataclass(frozen=True, slots=True)
class RolloutKey:
    """Which rollout this is; its seeds derive from every field, so a retry is a fresh try.

    Attributes:
        purpose: ``train``, ``validation`` or ``eval``.
        ordinal: Position of the task in the stream (or in the list of validation tasks).
        index: Which rollout of that task.
        attempt: 0, then one more per retry.
        incarnation: Start of the run that dispatched it; makes ids unique, does not change seeds.
    """

    purpose: str
    ordinal: int
    index: int
    attempt: int = 0
    incarnation: int = 0

    @property
    def rollout_id(self) -> str:
        """An opaque id, unique in a run folder."""
        return f"{self.purpose}-{self.incarnation}-{self.ordinal}-{self.index}-{self.attempt}"

    def seed(self, run_seed: int) -> int:
        """Root of the rollout's seeds."""
        return derive_seed(run_seed, self.purpose, self.ordinal, self.index, self.attempt)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a rollout.

    Attributes:
        episode: What came of it.
        is_final: Whether another try would fail in the same way.
    """

    episode: Episode
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout that has ended.

    Attributes:
        episode: The last attempt's.
        failed: Episodes of the attempts before it.
    """

    episode: Episode
    failed: list[Episode] = field(default_factory=list)


class RolloutRunner:
    """Runs a workflow on tasks. A rollout owns what it started: its completers, forks and requests end with it.

    Args:
        workflow: What to play.
        engine: Whom to ask.
        config: The run file.
        observers: Told of every episode.
        lockstep: See `RequestMerger`.
        needs_reward: Whether a trajectory of a group (`Workflow.group_of`) without a reward is an error.
        teacher: Who scores training rollouts that ended well; None for nobody.
        needs_teacher: Whether the trajectories of a group are scored.
    """

    def __init__(
        self,
        workflow: Workflow,
        engine: RolloutEngine,
        config: RunConfig,
        observers: Observers,
        *,
        lockstep: bool,
        needs_reward: Callable[[str], bool] = lambda group: True,
        teacher: Teacher | None = None,
        needs_teacher: Callable[[str], bool] = lambda group: True,
    ) -> None:
        self.workflow = workflow
        self.engine = engine
        self.config = config
        self.observers = observers
        self._needs_reward = needs_reward
        self._teacher = teacher
        self._needs_teacher = needs_teacher
        self.merger = RequestMerger(engine, config.rollout, lockstep=lockstep)
        self._slots = Slots(config.rollout.max_concurrent_rollouts)
        self._timer = SharedTimer(config.rollout.rollout_timeout_seconds)
        self._pid = os.getpid()
        self._running: set[asyncio.Task[Episode]] = set()  # those left behind, too
        self._lingering: set[RolloutScope] = set()  # of rollouts that have ended, with requests that have not
        self._waiting: list[asyncio.Future[None]] = []
        self._train_params = self._params(config.rollout.temperature, config.rollout.top_p, config.rollout.top_k)
        self._validation_params = self._params(config.rollout.validation_temperature, 1.0, 0)

    @property
    def slots(self) -> Slots:
        """The places of rollouts that run, for those who watch how many are in use."""
        return self._slots

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
        """Run the workflow on a task, again after a failure while ``rollout.max_attempts`` allows and it can help.

        Args:
            task: The task.
            key: Of the first attempt.
            started: Called before every attempt.
            ended: Awaited after every attempt, with its episode.

        Raises:
            UserError: If what is wrong is for the user to fix, so that trying again is no use.
        """
        failed: list[Episode] = []
        while True:
            started(key)
            attempt = await self.attempt(task, key)
            if ended is not None:
                await ended(attempt.episode)
            may_retry = key.attempt + 1 < self.config.rollout.max_attempts and not attempt.is_final
            if not attempt.episode.termination_reason.is_failure or not may_retry:
                return Rollout(attempt.episode, failed)
            failed.append(attempt.episode)
            key = replace(key, attempt=key.attempt + 1)

    async def attempt(self, task: Task, key: RolloutKey) -> Attempt:
        """One attempt; what the workflow or the engine does wrong is a reason in its episode."""
        is_validation = key.purpose != "train"
        async with self._slots.place(priority=is_validation):
            self.merger.rollout_started()
            try:
                attempt = await self._limited(task, key, is_validation)
            finally:
                self.merger.rollout_ended()
            episode = attempt.episode
            if self._teacher is not None and not is_validation and not episode.termination_reason.is_failure:
                episode = await self._scored(self._teacher, task, episode)
        # Filling in the identity of a record that was validated a moment ago needs no second validation.
        identity = {"rollout_id": key.rollout_id, "rollout_index": key.index, "is_validation": is_validation}
        if type(episode) is not Episode:  # a plugin's own, which may hold more than fields
            return Attempt(episode.model_copy(update=identity), attempt.is_final)
        return Attempt(Episode._trusted(**(episode.__dict__ | identity)), attempt.is_final)

    async def idle(self) -> None:
        """Wait until the engine works on no request of a rollout that has ended."""
        while self._lingering:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future
        await self.merger.idle()

    def whereabouts(self) -> str:
        """Where rollouts wait, a few of them."""
        lingering = f"; requests of {len(self._lingering)} ended rollouts are in the engine" if self._lingering else ""
        return whereabouts(self._running, shown=5) + lingering

    async def aclose(self) -> None:
        """Stop what is still in the engine."""
        await self.merger.aclose()

    async def _limited(self, task: Task, key: RolloutKey, is_validation: bool) -> Attempt:
        """One attempt that ends when its time is up, whatever the workflow does."""
        loop = asyncio.get_running_loop()
        scope = RolloutScope(f"rollout {key.rollout_id}", loop, self._idle_scope)
        # A task of its own, so that one that ignores its cancellation can be left behind.
        work = loop.create_task(
            self._work(task, self._completer(key, is_validation, scope), scope),
            name=f"rollout {key.rollout_id} of task {task.task_id!r}",
        )
        over: asyncio.Future[None] = loop.create_future()
        self._running.add(work)

        def end(work: asyncio.Task[Episode]) -> None:
            self._running.discard(work)
            if not over.done():
                over.set_result(None)

        work.add_done_callback(end)
        deadline = self._timer.deadline()
        try:
            with deadline:
                await over
        except TimeoutError:
            if not work.done():  # or it ended in the moment in which its time was up
                return await self._late(task, work, scope)
        except asyncio.CancelledError:
            await self._end(work, scope)
            raise
        finally:
            scope.close()
            if scope.is_busy:
                self._lingering.add(scope)
        return self._outcome(task, work)

    async def _work(self, task: Task, completer: Completer, scope: RolloutScope) -> Episode:
        try:
            # Accepted before anything else runs: what the workflow changes afterwards changes no record of the run.
            returned = await contained(self.workflow.run(task, completer))
            return accept(returned, task, self.workflow, scope, self._needs_reward)
        finally:
            if os.getpid() != self._pid:
                # A child that run() forked and let continue: it would write the parent's files a second time.
                os.write(2, f"a process forked by run() of workflow {self.workflow.name!r} returned; killed\n".encode())
                os._exit(1)

    async def _end(self, work: asyncio.Task[Episode], scope: RolloutScope) -> bool:
        """Cancel what a rollout still does; False if it ignores that and has to be left behind."""
        work.cancel()
        scope.close(but=work)
        return not await stop(work)

    async def _late(self, task: Task, work: asyncio.Task[Episode], scope: RolloutScope) -> Attempt:
        place = waiting_at(work)
        late = f"the rollout took longer than {self._timer.seconds:g} s"
        if place is not None:
            late += f"; it waited at {place}"
        if not await self._end(work, scope):
            late += (
                ", ignored its cancellation and is still running; let asyncio.CancelledError propagate: catch "
                "Exception, not BaseException"
            )
        return Attempt(self._failed(task, TerminationReason.TIMEOUT, late))

    def _idle_scope(self, scope: RolloutScope) -> None:
        self._lingering.discard(scope)
        if not self._lingering:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def _outcome(self, task: Task, work: asyncio.Task[Episode]) -> Attempt:
        """What came of a rollout that has ended by itself."""
        if work.cancelled():  # by nobody here: something it waited for was
            return Attempt(self._failed(task, TerminationReason.CANCELLED, "the workflow was cancelled from within"))
        try:
            episode = work.result()
        except RefusedConversation as error:
            return Attempt(self._failure(task, error))
        except UserError:
            raise  # the run file, a model or a dataset is wrong, and the next rollout would find the same
        except Exception as error:  # the workflow's own code: anything may happen there, and it is reported
            return Attempt(self._failure(task, error), is_final=_is_final(error))
        if episode.termination_reason.is_failure:
            error_text = episode.error or "reported by the workflow"
            return Attempt(self._failed(task, episode.termination_reason, error_text))
        if not episode.trajectories:
            return Attempt(self._failed(task, episode.termination_reason, "the episode has no trajectory"))
        return Attempt(episode)

    async def _scored(self, teacher: Teacher, task: Task, episode: Episode) -> Episode:
        """The episode with what the teacher thinks of it; without that, it is a failed attempt like any other."""
        try:
            return await teacher.score(
                episode, lambda whole, part: self._needs_teacher(self.workflow.group_of(whole, part))
            )
        except RefusedConversation as error:
            return self._failure(task, error)
        except UserError:
            raise
        except Exception as error:  # somebody else's engine, parser and tokenizer
            return self._failure(task, error)

    def _failure(self, task: Task, error: Exception) -> Episode:
        """The episode of a rollout that ended with ``error``."""
        if isinstance(error, Terminated):
            return self._failed(task, error.reason, str(error))
        if isinstance(error, TimeoutError):
            return self._failed(task, TerminationReason.TIMEOUT, blamed(error))
        if isinstance(error, EngineError):
            return self._failed(task, TerminationReason.ENGINE_ERROR, str(error))
        if isinstance(error, Refused):
            return self._failed(task, TerminationReason.ERROR, str(error))
        raised = error.__cause__ if isinstance(error, Escaped) and error.__cause__ is not None else error
        episode = self._failed(task, TerminationReason.ERROR, blamed(raised))
        trace = well_formed("".join(traceback.format_exception(raised)))[-MAX_TRACEBACK_CHARACTERS:]
        episode.metadata = freeze({"traceback": trace})
        logger.debug("task %s: %s", task.task_id, trace)
        return episode

    @staticmethod
    def _failed(task: Task, reason: TerminationReason, error: str) -> Episode:
        return Episode(task_id=task.task_id, termination_reason=reason, error=error)

    def _completer(self, key: RolloutKey, is_validation: bool, scope: RolloutScope) -> Completer:
        params = self._validation_params if is_validation else self._train_params
        seed = key.seed(self.config.training.seed)
        limit = self.config.rollout.max_prompt_tokens
        if self.engine.supports_token_in_token_out and self.engine.parser is not None:
            return TITOCompleter(
                self.engine,
                sampling_params=params,
                seed=seed,
                is_validation=is_validation,
                max_prompt_tokens=limit,
                source=self.merger,
                on_segment_break=self.config.rollout.on_segment_break,
                scope=scope,
            )
        return Completer(
            self.engine,
            sampling_params=params,
            seed=seed,
            is_validation=is_validation,
            max_prompt_tokens=limit,
            scope=scope,
        )


def _is_final(error: Exception) -> bool:
    """Whether another attempt would end like this: `run` makes a record of what is none, or returns what is refused."""
    if isinstance(error, ValidationError):
        return error.title in {record.__name__ for record in (Episode, Trajectory, Step)}
    return isinstance(error, Refused)
