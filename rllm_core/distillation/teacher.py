"""Teacher for distillation: scores the policy's tokens before a rollout joins its group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rllm_core.algorithms.samples import trained_segments
from rllm_core.config import RolloutConfig
from rllm_core.costs import TEACHER, spend
from rllm_core.distillation.alignment import Alignment, align, one_to_one
from rllm_core.engine import EngineError, RolloutEngine
from rllm_core.errors import ConfigError
from rllm_core.limits.request_retries import retried, unanswered
from rllm_core.parser import BaseParser
from rllm_core.types import Episode, Step, TokenIds, Trajectory, freeze, starts_with, token_ids

ResultT = TypeVar("ResultT")

UNSCORED_TOKENS = "teacher_unscored_tokens"


class Teacher:
    """Writes ``log p_teacher - log p_student`` of every sampled token to `rllm_core.types.Step.advantages`.

    A teacher reads the student's tokens if it has the same vocabulary and ``teacher.parser`` is not set. Otherwise the
    teacher's parser renders the messages, and the bytes of the completion are encoded as the teacher's own tokens
    (`rllm_core.distillation.alignment`). Tokens without a score get 0 and are listed in the step's metadata.

    Args:
        parser: Parser of the teacher, if it does not read the student's tokens.
        limits: Timeout and maximum attempts per call, and maximum concurrent calls.
    """

    def __init__(
        self, engine: RolloutEngine, student: BaseParser, parser: BaseParser | None, limits: RolloutConfig
    ) -> None:
        self.engine = engine
        self.student = student
        self.parser = parser
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.max_concurrent_requests)
        self._vocabularies = None if parser is None else (student.vocabulary(), parser.vocabulary())
        stop = parser.get_stop_token_ids()[0] if parser is not None else 0
        self._stops = dict.fromkeys(student.get_stop_token_ids(), stop)

    async def score(self, episode: Episode, wants: Callable[[Episode, Trajectory], bool]) -> Episode:
        """Scores the sampled steps of the trajectories for which ``wants`` is true.

        Raises:
            EngineError: If the teacher did not answer, or the student's log-probabilities are missing.
        """

        async def scored(trajectory: Trajectory) -> Trajectory:
            wanted = trajectory.trainable and wants(episode, trajectory)
            return await self._trajectory(trajectory) if wanted else trajectory

        trajectories = await _together(scored(trajectory) for trajectory in episode.trajectories)
        return episode.model_copy(update={"trajectories": trajectories})

    async def _trajectory(self, trajectory: Trajectory) -> Trajectory:
        steps = list(trajectory.steps)
        for step in steps:
            if step.weight_version is not None and step.logprobs is None:
                raise EngineError("distillation needs the policy's log-probabilities, but its engine returned none")
        if self.parser is None:
            await self._same_tokens(trajectory, steps)
        else:
            sampled = [s.weight_version is not None and len(s.completion_ids) > 0 for s in steps]
            await _together(self._own_tokens(steps, position) for position, wanted in enumerate(sampled) if wanted)
        return trajectory.model_copy(update={"steps": steps})

    async def _same_tokens(self, trajectory: Trajectory, steps: list[Step]) -> None:
        """Scores each unbroken sequence with one call, and splits the result into turns."""
        for segment in trained_segments(trajectory):
            last, first = steps[segment.last], steps[segment.trained[0]]
            _reject_media(last)
            whole = np.concatenate((last.prompt_ids, last.completion_ids))
            start = len(first.prompt_ids)
            known = await self._ask(token_ids(whole), start)
            for position in segment.trained:
                step = steps[position]
                begin = len(step.prompt_ids) - start
                theirs = known[begin : begin + len(step.completion_ids)]
                steps[position] = _scored(step, one_to_one(step.completion_ids), theirs)

    async def _own_tokens(self, steps: list[Step], position: int) -> None:
        step = steps[position]
        assert self.parser is not None
        assert self._vocabularies is not None
        _reject_media(step)
        if position == 0:
            self._check_prompt(step)
        alignment = align(step.completion_ids, *self._vocabularies, self._stops)
        prompt = self.parser.render(step.messages, tools=step.tools or None)
        known = np.empty(0, np.float32)
        if alignment.teacher_ids:
            known = await self._ask(token_ids([*prompt, *alignment.teacher_ids]), len(prompt))
        steps[position] = _scored(step, alignment, known)

    def _check_prompt(self, step: Step) -> None:
        """Rejects prompts with tools that the teacher's parser cannot render, or with more than messages and tools."""
        assert self.parser is not None
        if step.tools and not self.parser.supports_tools:
            raise ConfigError(
                f"the workflow offers tools, but the teacher's parser {self.parser.name!r} does not support them; "
                "choose a teacher with the student's vocabulary, and remove teacher.parser"
            )
        rendered = token_ids(self.student.render(step.messages, tools=step.tools or None))
        if len(rendered) != len(step.prompt_ids) or not starts_with(rendered, step.prompt_ids):
            raise ConfigError(
                "the first prompt of a rollout contains more than its messages and tools, but a teacher with its own "
                "parser gets only those; choose a teacher with the student's vocabulary, and remove "
                "teacher.parser"
            )

    async def _ask(self, tokens: TokenIds, start: int) -> npt.NDArray[np.float32]:
        """Calls the engine, and retries after a pause while the engine is busy."""
        engine, limits = self.engine, self._limits

        async def attempt() -> npt.NDArray[np.float32]:
            try:
                async with self._slots, asyncio.timeout(limits.request_timeout_seconds) as deadline:
                    return await engine.compute_logprobs(tokens, start=start)
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                raise unanswered(f"the teacher, engine {engine.name!r},", limits.request_timeout_seconds) from error

        began = time.perf_counter()
        try:
            known = await retried(attempt, attempts=limits.max_request_attempts, seed=int(tokens[-1]))
        except BaseException:
            spend(TEACHER, unmetered=1, seconds=time.perf_counter() - began)
            raise
        spend(TEACHER, prompt_tokens=len(tokens), seconds=time.perf_counter() - began)
        if known.shape != (len(tokens) - start,):
            raise EngineError(
                f"the teacher, engine {engine.name!r}, returned {known.shape} log-probabilities for "
                f"{len(tokens) - start} tokens"
            )
        return known


async def _together(work: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Returns all results; the first failure stops the others, and is raised without its exception group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(part) for part in work]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]


def _scored(step: Step, alignment: Alignment, teacher_logprobs: npt.NDArray[np.float32]) -> Step:
    assert step.logprobs is not None
    advantages, scored = alignment.advantages(step.logprobs, teacher_logprobs)
    advantages.setflags(write=False)
    update: dict[str, Any] = {"advantages": advantages}
    if not scored.all():
        unscored = np.flatnonzero(~scored).tolist()
        update["metadata"] = freeze({**step.metadata, UNSCORED_TOKENS: unscored})
    return step.model_copy(update=update)


def _reject_media(step: Step) -> None:
    if step.prompt_media:
        raise ConfigError("a teacher reads only text, but a prompt contains images")
