"""``reasoning_gym``: one question from a reasoning-gym dataset, scored by the dataset's own checker. Single turn."""

from __future__ import annotations

import asyncio
import random
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rllm_core.engine import Completer
from rllm_core.errors import ConfigError
from rllm_core.sandbox import (
    ChildDied,
    ChildError,
    ChildFunction,
    ChildOutOfMemory,
    ChildTimeout,
    Limits,
    call_with_retry,
)
from rllm_core.services import RewardFunction, Score
from rllm_core.types import Episode, FinishReason, Messages, Task, TerminationReason
from rllm_core.workflow import LazyTasks, Split, Workflow, WorkflowConfig
from rllm_environments.catalog import AuditFiles, Description
from rllm_environments.reasoning_gym import datasets
from rllm_environments.reasoning_gym.warm_start import asked_and_answered

POSE = "rllm_environments.reasoning_gym.child:pose"
CHECK_IN_SANDBOX = "rllm_environments.reasoning_gym.preloaded:score"
POSE_LIMITS = Limits(wall_seconds=120.0, memory_bytes=4 << 30)
CHECK_MEMORY_BYTES = 4 << 30
PREPARE_SECONDS = 120.0
"""Time for a checker's process to import reasoning-gym and create the entry, on a busy machine."""
ANSWER_ERRORS = (ChildDied, ChildOutOfMemory, ChildTimeout)
"""Errors caused by an answer's text. Errors that the checker raises are handled in its process."""
QUESTIONS_KEPT = 4096
ASK_FOR_TAGS = "Think step by step. Then write only the final answer between <answer> and </answer>."

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymConfig(WorkflowConfig):
    """``[reasoning_gym]``: the dataset, its options, and where the answer is in a completion."""

    environment: Annotated[
        str, Field(description="Name of the dataset, as in `rllm-core environments list reasoning_gym`.")
    ] = "spell_backward"
    options: Annotated[
        dict[str, Any],
        Field(description="Configuration of the dataset, such as {min_word_len = 3}. Not its size or seed."),
    ] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=0, description="Seed of the questions.")] = 0
    train_size: Annotated[int, Field(ge=1, le=1_000_000, description="Number of training tasks.")] = 2000
    validation_size: Annotated[
        int,
        Field(ge=1, le=100_000, description="Number of validation tasks. They share no question with training tasks."),
    ] = 200
    answer: Annotated[
        Literal["plain", "tags"],
        Field(
            description="Where the answer is: the whole completion (`plain`), or the last text between <answer> and "
            "</answer> (`tags`), which a system message asks for."
        ),
    ] = "plain"
    check_timeout_seconds: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Maximum CPU time of a checker, in seconds. Beyond it, the reward is 0.",
        ),
    ] = 10.0
    allow_code_execution: Annotated[
        bool,
        Field(
            description="Run checkers that execute the model's answer as Python with the rights of this user, not in a "
            "sandbox that isolates."
        ),
    ] = False


class ReasoningGymWorkflow(Workflow):
    """Single-turn task: the prompt is a question from the dataset, and the reward is the score of its own checker.

    Most checkers give partial credit, and only a reward of 1 counts as correct. A truncated completion gets 0. Checkers
    run in child processes under time and memory limits. If the checker raises on an answer or exceeds a limit, the
    answer gets 0 and counts in the metric ``rejected``. A child process also creates the questions, when they are
    asked.

    Some checkers execute the answer. They run in a sandbox that isolates, or, with ``allow_code_execution``, like the
    others. An answer executed in the checker's process can give itself any reward.
    """

    name: ClassVar[str] = "reasoning_gym"
    config_model: ClassVar[type[WorkflowConfig]] = ReasoningGymConfig
    audit_files: ClassVar[AuditFiles] = datasets.AUDIT_FILES
    audits: ClassVar[str] = "rllm_environments.reasoning_gym.audit:audits"
    config: ReasoningGymConfig

    def __init__(self, config: WorkflowConfig | None = None, *, found: Mapping[str, Any] | None = None) -> None:
        """Creates the workflow; ``found`` replaces the committed audit findings."""
        super().__init__(config)
        self._found = datasets.findings(self.config.environment) if found is None else found
        self._children: ChildFunction | None = None
        self._questions: OrderedDict[str, tuple[int, str]] = OrderedDict()
        self._scoring: dict[tuple[str, str], asyncio.Future[Score]] = {}
        self._is_checked = found is not None

    @property
    def is_sandboxed(self) -> bool:
        """Whether the checker runs inside a sandbox with isolation."""
        return bool(self._found.get("executes_answers")) and not self.config.allow_code_execution

    @property
    def check_limits(self) -> Limits:
        """Limits for one call of the checker."""
        seconds = self.config.check_timeout_seconds + PREPARE_SECONDS
        return Limits(wall_seconds=seconds, memory_bytes=CHECK_MEMORY_BYTES)

    @cached_property
    def _grade(self) -> RewardFunction:
        if not self.is_sandboxed:
            return self.services.reward_function("reasoning_gym", self.check_limits, blame_text=ANSWER_ERRORS)
        function = self.services.isolating_sandbox().function(CHECK_IN_SANDBOX, self.check_limits)

        async def grade(task: Task, text: str) -> Score:
            try:
                reward, parts = await call_with_retry(function, dict(task.data), text)
            except ANSWER_ERRORS:
                return Score(0.0, {"rejected": 1.0})
            return Score(reward, parts)

        return grade

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns the tasks of a split. They are created on demand, and hold the recipe of a question, not its text.

        Raises:
            ConfigError: If the dataset is unknown or refused, or does not accept the options.
        """
        self._check()
        return _tasks(self.config, split)

    async def close(self) -> None:
        """Stops the child process that creates questions."""
        vars(self).pop("_grade", None)  # a sandbox closes its functions itself
        if self._children is not None:
            self._children.close()
            self._children = None

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Asks the question and has the answer checked."""
        index, question = await self.question(task)
        step = await completer.complete(self.prompt(question))
        is_cut_off = step.finish_reason is FinishReason.LENGTH
        answer = None if is_cut_off else self.answer_in(step.text)
        score = Score(0.0) if answer is None else await self.score(task, index, answer)
        return self.episode(
            task,
            [step],
            reward=float(score),
            is_correct=score >= 1.0,
            termination_reason=TerminationReason.MAX_RESPONSE_TOKENS if is_cut_off else TerminationReason.DONE,
            metrics={"answered": float(answer is not None), "rejected": score.numbers.get("rejected", 0.0)},
        )

    def prompt(self, question: str) -> Messages:
        """Returns the messages that ask a question."""
        asked = {"role": "user", "content": question}
        return Messages(
            [{"role": "system", "content": ASK_FOR_TAGS}, asked] if self.config.answer == "tags" else [asked]
        )

    def answer_in(self, text: str) -> str | None:
        """Returns the answer in a completion, or None if it has no tags and should."""
        if self.config.answer == "plain":
            return text.strip()
        tagged = _TAGGED.findall(text)
        return tagged[-1].strip() if tagged else None

    def warm_start(self, rng: random.Random) -> Iterator[list[dict[str, Any]]] | None:
        """Yields conversations that teach the form of an answer, but not which one is right; see `warm_start`."""
        self._check()
        form = "<answer>{}</answer>" if self.config.answer == "tags" else "{}"
        return (
            [*self.prompt(question), {"role": "assistant", "content": form.format(answer)}]
            for question, answer in asked_and_answered(self.config.environment, self.tasks("train"), rng)
        )

    @classmethod
    def describe(cls, variant: str) -> dict[str, Any]:
        """Describes a dataset for ``rllm-core environments``, without importing reasoning-gym."""
        found = datasets.findings(variant)
        return {**found, **vars(Description.of(variant, found))} if found else {}

    def _check(self) -> None:
        if self._is_checked:
            return
        found = datasets.checked(self.config.environment)
        if found["executes_answers"] and not self.config.allow_code_execution:
            self._check_sandbox()
        for split in ("train", "validation"):
            self._try(_tasks(self.config, split)[0])
        self._is_checked = True

    def _check_sandbox(self) -> None:
        try:
            self.services.isolating_sandbox()
        except ConfigError as error:
            raise ConfigError(
                f"reasoning_gym.environment = {self.config.environment!r}: its checker executes the model's answer as "
                f"Python; {error}; or set reasoning_gym.allow_code_execution = true to run it with your rights"
            ) from error

    def _try(self, task: Task) -> None:
        """Creates a question in a thread, because the caller may be inside an event loop.

        Raises:
            ConfigError: If reasoning-gym does not accept the options, or a split has no questions.
        """
        with ThreadPoolExecutor(1) as thread:
            try:
                thread.submit(lambda: asyncio.run(self.question(task))).result()
            except ChildError as error:
                reason = str(error).removeprefix(f"{POSE} raised ")
                raise ConfigError(
                    f"reasoning_gym: dataset {self.config.environment!r} with options = {self.config.options!r:.200} "
                    f"has no questions: {reason:.300}"
                ) from None

    async def question(self, task: Task) -> tuple[int, str]:
        """Returns index and text of a task's question."""
        known = self._questions.get(task.task_id)
        if known is None:
            if self._children is None:
                self._children = ChildFunction(POSE, POSE_LIMITS, children=1)
            index, question = await self._children(dict(task.data))
            known = self._questions[task.task_id] = (index, question)
            while len(self._questions) > QUESTIONS_KEPT:
                self._questions.popitem(last=False)
        return known

    async def score(self, task: Task, index: int, answer: str) -> Score:
        """Returns the checker's score for an answer to the question at an index.

        Rollouts that submit the same answer at the same time share one call, as most of a group do late in training.
        """
        key = task.task_id, answer
        running = self._scoring.get(key)
        if running is None or running.get_loop() is not asyncio.get_running_loop():
            running = self._scoring[key] = asyncio.ensure_future(self._scored(task, index, answer))
            running.add_done_callback(partial(self._is_scored, key))
        return await asyncio.shield(running)

    def _is_scored(self, key: tuple[str, str], done: asyncio.Future[Score]) -> None:
        self._scoring.pop(key, None)
        if not done.cancelled():
            done.exception()  # marks the error as retrieved: its rollouts may all have been cancelled

    async def _scored(self, task: Task, index: int, answer: str) -> Score:
        seconds = self.config.check_timeout_seconds
        asked = Task(task_id=task.task_id, data={**task.data, "index": index, "check_seconds": seconds})
        return await self._grade(asked, answer)


def _tasks(config: ReasoningGymConfig, split: Split) -> LazyTasks:
    recipe = {
        "environment": config.environment,
        "options": config.options,
        "seed": config.seed,
        "train_size": config.train_size,
        "validation_size": config.validation_size,
        "split": split,
    }

    def make(number: int) -> Task:
        return Task(task_id=f"{config.environment}-{config.seed}-{split}-{number}", data={**recipe, "number": number})

    return LazyTasks(make, config.train_size if split == "train" else config.validation_size)
