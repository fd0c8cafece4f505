"""Runs rollouts for the workflow checks, with a scripted model and a watch on the event loop."""

from __future__ import annotations

import asyncio
import json
import random
import re
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from rllm_core.assembly.tasks import Tasks, spread
from rllm_core.engine import EngineError, TITOCompleter, derive_seed
from rllm_core.parser import ParsedCompletion, ParsedToolCall, ToolSpec
from rllm_core.score import MAX_REWARD
from rllm_core.types import (
    Episode,
    FinishReason,
    MessageLike,
    MessageView,
    SamplingParams,
    Step,
    Task,
    TokenIds,
    TokenOutput,
    token_ids,
)
from rllm_core.workflow import Split, Workflow
from rllm_devkit.checks.answers import CALL_CLOSE, CALL_OPEN, fitting
from rllm_devkit.checks.results import Violation
from rllm_devkit.checks.watch import Blocked, LoopWatch, held
from rllm_devkit.scripted import ByteParser, ScriptedEngine

ResultT = TypeVar("ResultT")

SPLITS: tuple[Split, ...] = ("train", "validation")

MAX_ASKED = 1_000  # model calls per rollout before it counts as endless
MAX_RESPONSE_TOKENS = 400_000
LATEST_GIVING_UP_SECONDS = 2.0

_CALL = re.compile(f"{CALL_OPEN}(.*?){CALL_CLOSE}", re.DOTALL)


def tasks_of(workflow: Workflow, split: Split) -> Sequence[Task]:
    """Returns the tasks of a split, validated as in a run.

    Raises:
        UserError: If a run would reject them.
    """
    return Tasks(workflow, getattr(workflow, "name", type(workflow).__name__)).of(split)


class ToolParser(ByteParser):
    """`ByteParser` with tools: a call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

    supports_tools = True

    def parse_completion(
        self,
        completion_ids: Sequence[int] | TokenIds,
        *,
        prompt_ids: Sequence[int] | TokenIds | None = None,
        tools: Sequence[ToolSpec] | None = None,
    ) -> ParsedCompletion:
        """See `BaseParser.parse_completion`."""
        plain = super().parse_completion(completion_ids)
        if not tools:
            return plain
        calls = tuple(_parsed_call(raw) for raw in _CALL.findall(plain.content))
        return ParsedCompletion(_CALL.sub("", plain.content), tool_calls=calls, termination=plain.termination)


def _parsed_call(raw: str) -> ParsedToolCall:
    try:
        call = json.loads(raw)
    except (ValueError, RecursionError):
        return ParsedToolCall(None, None, raw, "not JSON")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(call["arguments"], dict):
        return ParsedToolCall(None, None, raw, "not a call")
    return ParsedToolCall(call["name"], call["arguments"], raw)


@dataclass(frozen=True)
class ProbedTurn:
    """One model call, as passed to a policy.

    Attributes:
        number: Number of the call in its rollout, from 0.
        task: Task of the rollout.
        tools: Tools offered to the model.
        rng: Random generator of the call, seeded from the rollout's seed.
    """

    number: int
    task: Task
    tools: Sequence[ToolSpec]
    rng: random.Random


@dataclass(frozen=True)
class Said:
    """A policy's answer; ``is_cut_off`` marks a truncated one."""

    text: str
    is_cut_off: bool = False


Policy = Callable[[ProbedTurn], Awaitable[Said]]


@dataclass
class ProbedRollout:
    """The record of a rollout.

    Attributes:
        given: Steps the completer returned, each with the number of its conversation.
        prompts: Conversations sent to the model.
        tools: Tools offered in the calls.
        asked: Number of model calls.
        returned: Result of ``run``.
        error: Exception ``run`` raised instead.
    """

    task: Task
    given: list[tuple[int, Step]] = field(default_factory=list)
    prompts: list[MessageView] = field(default_factory=list)
    tools: list[ToolSpec] = field(default_factory=list)
    conversations: int = 0
    asked: int = 0
    returned: Any = None
    error: BaseException | None = None

    def episode(self) -> Episode:
        """Returns the episode.

        Raises:
            Broken: If ``run`` returned no usable episode of the task.
        """
        if self.error is not None:
            raise Violation(f"task {self.task.task_id!r}: run() raised {described(self.error)}") from self.error
        found = self.returned
        if not isinstance(found, Episode):
            raise Violation(f"run() must return an Episode, got {type(found).__name__}")
        if found.task_id != self.task.task_id:
            raise Violation(f"run() got task {self.task.task_id!r}, but returned an episode of {found.task_id!r}")
        if found.termination_reason.is_failure:
            raise Violation(
                f"task {found.task_id!r}: termination_reason is {found.termination_reason.value!r}, but nothing failed"
            )
        if not found.trajectories:
            raise Violation(f"task {found.task_id!r}: the episode has no trajectory")
        return found


async def together(calls: Iterable[Awaitable[ResultT]]) -> list[ResultT]:
    """Returns the results of concurrent calls; raises the first error after all calls have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]  # exceptions were raised above


def described(error: BaseException) -> str:
    """Describes an exception and its origin in one line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300] + where


class _Source:
    """Token source of one rollout."""

    def __init__(self, rollout: ProbedRollout, policy: Policy, *, pauses: bool) -> None:
        self.rollout = rollout
        self.policy = policy
        self.pauses = pauses

    async def get_token_output_from_token_input(
        self, token_input: Any, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        rollout, rng = self.rollout, random.Random(seed)
        number, rollout.asked = rollout.asked, rollout.asked + 1
        if rollout.asked > MAX_ASKED:
            raise EngineError("too many model calls")
        await asyncio.sleep(0)  # separate the time of this turn from that of others
        if self.pauses:
            for _ in range(random.Random(derive_seed(seed, "pauses")).randrange(5)):
                await asyncio.sleep(0)
        said = await self.policy(ProbedTurn(number, rollout.task, tuple(rollout.tools), rng))
        ids = list(said.text.encode()) or [ord(" ")][: said.is_cut_off]
        ids += [] if said.is_cut_off else [ByteParser.END]
        cut = ids[: sampling_params.max_response_tokens]
        return TokenOutput(
            token_ids=token_ids(cut),
            logprobs=-np.random.default_rng(seed).exponential(size=len(cut)).astype(np.float32),
            finish_reason=FinishReason.STOP if cut[-1] == ByteParser.END else FinishReason.LENGTH,
            weight_version=0,
        )


class WatchedCompleter(TITOCompleter):
    """Records its prompts and steps, including those of its forks."""

    rollout: ProbedRollout
    conversation: int = 0

    @classmethod
    def of(cls, rollout: ProbedRollout, source: _Source, *, seed: int) -> WatchedCompleter:
        """Creates the completer of a rollout's first conversation."""
        completer = cls(
            ScriptedEngine(ToolParser()),
            sampling_params=SamplingParams(
                max_response_tokens=MAX_RESPONSE_TOKENS, stop_token_ids=ToolParser().get_stop_token_ids()
            ),
            seed=seed,
            source=source,
        )
        completer.rollout = rollout
        return completer

    def forked(self, name: int | str, after: Step | None = None) -> Self:
        """See `Completer.forked`."""
        forked = super().forked(name, after)
        self.rollout.conversations += 1
        forked.conversation = self.rollout.conversations
        return forked

    async def complete(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[ToolSpec] | None = None,
        **options: Any,
    ) -> Step:
        """See `Completer.complete`."""
        if tools:
            self.rollout.tools[:] = tools
        self.rollout.prompts.append(MessageView(messages))
        step = await super().complete(messages, tools=tools, **options)
        self.rollout.given.append((self.conversation, step))
        return step


@dataclass
class WorkflowProbe:
    """Workflow under test, and how to run it.

    Attributes:
        make: Constructs the workflow.
        answers: Answers that fit its tasks.
        tasks_per_split: Number of tasks of each split to run.
        rollout_timeout_seconds: Timeout of a rollout, in seconds.
        watch: Watch on the event loop.
        held: Counts of the process' resources before the workflow was opened; empty before that, and after closing.
        played: Rollouts of the check `episodes`; empty until it passes.
    """

    make: Callable[[], Workflow]
    answers: Sequence[str]
    seed: int
    tasks_per_split: int
    rollout_timeout_seconds: float
    watch: LoopWatch
    held: dict[str, int] = field(default_factory=dict)
    played: list[tuple[ProbedRollout, Episode]] = field(default_factory=list)
    _workflow: Workflow | None = None

    @property
    def workflow(self) -> Workflow:
        """The single instance that runs all rollouts, as in a run."""
        if self._workflow is None:
            self._workflow = self.make()
        return self._workflow

    async def open(self) -> None:
        """Opens the workflow.

        Raises:
            Broken: If it takes too long.
        """
        self.held = held()
        await self._within("open()", self.workflow.open())

    async def close(self) -> None:
        """Closes the workflow; further calls do nothing.

        Raises:
            Broken: If it takes too long.
        """
        if self.held:
            self.held = {}
            await self._within("close()", self.workflow.close())
            await self._within("close() of its services", self.workflow.services.close())

    async def _within(self, what: str, call: Coroutine[Any, Any, None]) -> None:
        limit = self.rollout_timeout_seconds
        try:
            async with asyncio.timeout(limit) as deadline:
                await call
        except TimeoutError:
            if deadline.expired():
                raise Violation(f"{what} did not end within {limit:g} s") from None
            raise

    def tasks(self) -> list[Task]:
        """Returns some tasks of each split."""
        chosen = []
        for split in SPLITS:
            tasks = tasks_of(self.workflow, split)
            chosen += [task for task, _ in spread(tasks, min(self.tasks_per_split, len(tasks)))] if len(tasks) else []
        return chosen

    async def fitting(self, turn: ProbedTurn) -> Said:
        """Answers plausibly, like a model that is learning the task."""
        return Said(fitting(turn.task, turn.tools, turn.rng, self.answers))

    async def play(
        self,
        task: Task,
        policy: Policy | None = None,
        *,
        seed: int = 0,
        pauses: bool = False,
    ) -> ProbedRollout:
        """Runs one rollout; records an exception of ``run``.

        Raises:
            Broken: If it does not end, or blocks the event loop twice (once may be due to a busy machine).
        """
        for last in (False, True):
            running = self.start(task, policy, seed=seed, pauses=pauses)
            try:
                done, _ = await asyncio.wait({running}, timeout=self.rollout_timeout_seconds)
            finally:
                running.cancel()
            if not done:
                await asyncio.wait({running}, timeout=LATEST_GIVING_UP_SECONDS)
                raise Violation(f"a rollout did not end within {self.rollout_timeout_seconds:g} s")
            if running.cancelled():
                raise Violation(f"task {task.task_id!r}: run() raised CancelledError without being cancelled")
            rollout = running.result()
            if rollout.asked > MAX_ASKED:
                raise Violation(f"a rollout called the model more than {MAX_ASKED} times; limit its turns")
            if not isinstance(rollout.error, Blocked):
                break
            if last:
                raise Violation(f"run() blocked the event loop: {described(rollout.error)}") from rollout.error
        return rollout

    def start(
        self,
        task: Task,
        policy: Policy | None = None,
        *,
        seed: int = 0,
        pauses: bool = False,
    ) -> asyncio.Task[ProbedRollout]:
        """Starts a rollout."""
        rollout = ProbedRollout(task)
        source = _Source(rollout, policy or self.fitting, pauses=pauses)
        completer = WatchedCompleter.of(rollout, source, seed=derive_seed(self.seed, seed))
        return asyncio.create_task(self._played(rollout, completer))

    async def _played(self, rollout: ProbedRollout, completer: WatchedCompleter) -> ProbedRollout:
        try:
            with self.watch.rollout():
                rollout.returned = await self.workflow.run(rollout.task, completer)
        except (Exception, SystemExit, Blocked) as error:  # third-party code may raise anything
            rollout.error = error
        return rollout

    def check_rewards(self, episode: Episode) -> list[float]:
        """Returns the rewards of the trajectories that are trained.

        Raises:
            Broken: If a reward is missing, not finite or too large.
        """
        rewards = []
        for trajectory in episode.trajectories:
            if not trajectory.trainable or (not self.workflow.samples and not trajectory.has_reward):
                continue
            where = f"task {episode.task_id!r}, role {trajectory.role!r}"
            if not trajectory.has_reward:
                raise Violation(f"{where}: neither the trajectory nor any of its steps has a reward")
            for reward in (trajectory.total_reward, *(step.reward or 0.0 for step in trajectory.steps)):
                if not abs(reward) <= MAX_REWARD:  # also true for NaN
                    raise Violation(f"{where}: a reward is {reward:g}; it must be finite and at most {MAX_REWARD:g}")
            rewards.append(trajectory.total_reward)
        return rewards
