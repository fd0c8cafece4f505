"""Runs a workflow on a task and turns whatever happens into an episode with a reason."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rllm_core.config import RunConfig
from rllm_core.engine import Completer, EngineError, RolloutEngine, Terminated, TITOCompleter, derive_seed
from rllm_core.errors import UserError
from rllm_core.observers import Observers
from rllm_core.training.requests import RequestMerger
from rllm_core.training.shared_timer import SharedTimer
from rllm_core.training.slots import Slots
from rllm_core.types import Episode, SamplingParams, Task, TerminationReason, Trajectory, freeze, well_formed
from rllm_core.workflow import Workflow

if TYPE_CHECKING:
    from rllm_core.distillation.teacher import Teacher

logger = logging.getLogger(__name__)

MAX_TRACEBACK_CHARACTERS = 8000
MAX_REWARD = 1e30  # advantages are float32, and estimators add rewards up


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


class RolloutRunner:
    """Plays rollouts.

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

    async def run(self, task: Task, key: RolloutKey) -> Episode:
        """Play one rollout; what the workflow or the engine does wrong is a reason in its episode.

        Raises:
            UserError: If what is wrong is for the user to mend, so that trying again is no use.
        """
        is_validation = key.purpose != "train"
        deadline = self._timer.deadline()
        async with self._slots.place(priority=is_validation):
            self.merger.rollout_started()
            try:
                with deadline:
                    episode = self._checked(task, await self.workflow.run(task, self._completer(key, is_validation)))
            except asyncio.CancelledError:
                current = asyncio.current_task()
                assert current is not None
                if current.cancelling():
                    raise
                # Nobody wants this task to stop: something it waited for was cancelled.
                episode = self._failed(task, TerminationReason.CANCELLED, "the workflow was cancelled from within")
            except UserError:
                raise  # the run file, a model or a dataset is wrong, and the next rollout would find the same
            except Exception as error:  # the workflow's own code: anything may happen there, and it is reported
                episode = self._failure(task, error, expired=deadline.expired)
            finally:
                self.merger.rollout_ended()
            if self._teacher is not None and not is_validation and not episode.termination_reason.is_failure:
                episode = await self._scored(self._teacher, task, episode)
        # Filling in the identity of a record that was validated a moment ago needs no second validation.
        identity = {"rollout_id": key.rollout_id, "rollout_index": key.index, "is_validation": is_validation}
        if type(episode) is not Episode:  # a plugin's own, which may hold more than fields
            return episode.model_copy(update=identity)
        return Episode._trusted(**(episode.__dict__ | identity))

    def _checked(self, task: Task, episode: object) -> Episode:
        """What a workflow returned, if that is an episode of this task that training can use."""
        if not isinstance(episode, Episode):
            raise TypeError(f"workflow {self.workflow.name!r} returned {type(episode).__name__}, not an Episode")
        if episode.task_id != task.task_id:
            raise ValueError(f"workflow {self.workflow.name!r} returned an episode of task {episode.task_id!r}")
        if episode.termination_reason.is_failure:
            return self._failed(task, episode.termination_reason, episode.error or "reported by the workflow")
        if not episode.trajectories:
            return self._failed(task, episode.termination_reason, "the episode has no trajectory")
        for trajectory in episode.trajectories:
            if not trajectory.trainable:
                continue
            if trajectory.has_reward or self._needs_reward(self.workflow.group_of(episode, trajectory)):
                _check_rewards(trajectory)
        return episode

    async def _scored(self, teacher: Teacher, task: Task, episode: Episode) -> Episode:
        """The episode with what the teacher thinks of it; without that, it is a failed attempt like any other."""
        try:
            return await teacher.score(
                episode, lambda whole, part: self._needs_teacher(self.workflow.group_of(whole, part))
            )
        except UserError:
            raise
        except Exception as error:  # somebody else's engine, parser and tokenizer
            return self._failure(task, error, expired=False)

    def _failure(self, task: Task, error: Exception, *, expired: bool) -> Episode:
        """The episode of a rollout that ended with ``error``."""
        if isinstance(error, Terminated):
            return self._failed(task, error.reason, str(error))
        if isinstance(error, TimeoutError):
            late = f"the rollout took longer than {self._timer.seconds:g} s"
            return self._failed(task, TerminationReason.TIMEOUT, late if expired else f"TimeoutError: {error}")
        if isinstance(error, EngineError):
            return self._failed(task, TerminationReason.ENGINE_ERROR, str(error))
        episode = self._failed(task, TerminationReason.ERROR, f"{type(error).__name__}: {str(error)[:2000]}")
        trace = well_formed("".join(traceback.format_exception(error)))[-MAX_TRACEBACK_CHARACTERS:]
        episode.metadata = freeze({"traceback": trace})
        logger.debug("task %s: %s", task.task_id, trace)
        return episode

    @staticmethod
    def _failed(task: Task, reason: TerminationReason, error: str) -> Episode:
        return Episode(task_id=task.task_id, termination_reason=reason, error=error)

    def _completer(self, key: RolloutKey, is_validation: bool) -> Completer:
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
            )
        return Completer(
            self.engine, sampling_params=params, seed=seed, is_validation=is_validation, max_prompt_tokens=limit
        )

    async def aclose(self) -> None:
        """Stop what is still in the engine."""
        await self.merger.aclose()


def _check_rewards(trajectory: Trajectory) -> None:
    """A reward that is missing, or that no advantage can be computed from, is an error here and not a number later."""
    for reward in (trajectory.total_reward, *(step.reward or 0.0 for step in trajectory.steps)):
        if not abs(reward) <= MAX_REWARD:  # NaN is no reward either
            raise ValueError(f"a reward of {reward:g} cannot be trained on: its magnitude exceeds {MAX_REWARD:g}")
