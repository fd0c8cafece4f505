"""``openenv``: OpenEnv environments, given by the URL of their server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rllm_core.engine import Completer
from rllm_core.errors import ConfigError
from rllm_core.types import Episode, FinishReason, Messages, Step, Task, TerminationReason
from rllm_core.workflow import LazyTasks, Split, Workflow, WorkflowConfig
from rllm_environments.answers import action_of
from rllm_environments.openenv.session import (
    OpenEnvError,
    OpenEnvObservation,
    OpenEnvSession,
    Unreachable,
    WrongAction,
    address,
    session,
)

NO_ACTION = -1.0
FIRST_VALIDATION_SEED = 1_000_000
RETRY_SECONDS = 0.5


class OpenEnvConfig(WorkflowConfig):
    """``[openenv]``: the server, and how its observations and actions are written."""

    url: Annotated[
        str, Field(description="URL of the server, such as ws://localhost:8000. Its sessions are at /ws.")
    ] = "ws://localhost:8000"
    action_field: Annotated[
        str | None,
        Field(
            description="Field of the action that gets the model's answer, such as message. If unset, the answer must "
            "be a JSON object with all fields."
        ),
    ] = None
    observation_field: Annotated[
        str | None,
        Field(description="Field of the observation that the model sees. If unset, the whole observation as JSON."),
    ] = None
    instructions: Annotated[str, Field(description="Text before the first observation.")] = ""
    reset: dict[str, Any] = Field(
        default_factory=dict, description="Parameters of every reset, besides the seed of the task."
    )
    sessions: Annotated[
        int,
        Field(ge=1, description="Sessions that the server allows at once; further rollouts wait. Most allow one."),
    ] = 1
    timeout_seconds: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="Timeout of each message, in seconds.")
    ] = 60.0
    max_turns: Annotated[int, Field(ge=1, le=10_000, description="Maximum actions per rollout.")] = 50
    train_tasks: Annotated[int, Field(ge=1, le=1_000_000, description="Number of training seeds.")] = 4096
    validation_tasks: Annotated[int, Field(ge=0, le=1_000_000, description="Number of validation seeds.")] = 256


class OpenEnvWorkflow(Workflow):
    """Multi-turn: each rollout is one session with the server, and gets the server's own rewards.

    If the server refuses a session or closes it early, even normally, the rollout fails and yields no episode. An
    answer that is not an action, for this workflow or for the server, gets the reward -1 and ends the rollout; the
    metric ``no_action`` counts such answers.

    Validation uses other seeds than training. Whether a seed has any effect depends on the environment.
    """

    name: ClassVar[str] = "openenv"
    config_model: ClassVar[type[WorkflowConfig]] = OpenEnvConfig
    config: OpenEnvConfig

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        super().__init__(config)
        self._address = address(self.config.url)
        self._free: asyncio.Semaphore | None = None
        self._unreachable_since: float | None = None

    async def open(self) -> None:
        """Checks that the server is reachable.

        Raises:
            ConfigError: If the server is unreachable, or refuses a session.
        """
        self._free = asyncio.Semaphore(self.config.sessions)
        try:
            async with session(self._address, self.config.timeout_seconds) as found:
                await found.reset(self.config.reset)
        except OpenEnvError as error:
            raise ConfigError(f"openenv.url = {self.config.url!r}: {error}") from error

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns one task per seed."""
        size, first = self.config.train_tasks, 0
        if split == "validation":
            size, first = self.config.validation_tasks, FIRST_VALIDATION_SEED
        return LazyTasks(lambda number: Task(task_id=f"openenv-{first + number}", data={"seed": first + number}), size)

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Plays one episode as soon as a session is free."""
        if self._free is None:
            self._free = asyncio.Semaphore(self.config.sessions)
        async with self._free, AsyncExitStack() as leaving:
            return await self._play(await self._connected(leaving), task, completer)

    async def _connected(self, leaving: AsyncExitStack) -> OpenEnvSession:
        """Opens a session; waits for a server that restarts.

        Raises:
            OpenEnvError: If there is no connection, and nothing has been listening for the timeout of a message. The
                time counts from the first rollout that found nothing, so that a run without its server ends soon.
        """
        while True:
            try:
                found = await leaving.enter_async_context(session(self._address, self.config.timeout_seconds))
            except Unreachable:
                self._unreachable_since = self._unreachable_since or time.monotonic()
                if time.monotonic() - self._unreachable_since > self.config.timeout_seconds:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._unreachable_since = None
                return found

    async def _play(self, found: OpenEnvSession, task: Task, completer: Completer) -> Episode:
        shown = await found.reset({**self.config.reset, "seed": task.data["seed"]})
        opening = f"{self.config.instructions}\n\n" if self.config.instructions else ""
        messages = Messages([{"role": "user", "content": opening + self.text_of(shown)}])
        steps: list[Step] = []
        while not shown.is_done:
            if len(steps) == self.config.max_turns:
                return self._end(task, steps, TerminationReason.MAX_TURNS)
            step = await completer.complete(messages)
            steps.append(step)
            if step.finish_reason is FinishReason.LENGTH:
                return self._end(task, steps, TerminationReason.MAX_RESPONSE_TOKENS, no_action=True)
            try:
                shown = await found.step(self.action_of(step.text))
            except WrongAction:
                return self._end(task, steps, TerminationReason.DONE, no_action=True)
            step.reward = shown.reward
            messages.append(step.response)
            messages.append({"role": "user", "content": self.text_of(shown)})
        if not steps:
            raise OpenEnvError("the episode was over after reset")
        return self._end(task, steps, TerminationReason.DONE)

    def _end(self, task: Task, steps: list[Step], reason: TerminationReason, *, no_action: bool = False) -> Episode:
        if no_action:
            steps[-1].reward = NO_ACTION
        rewards = [step.reward for step in steps if step.reward is not None]
        if not rewards:
            raise OpenEnvError("the server gave no reward in the whole episode, so there is nothing to learn from")
        return self.episode(
            task,
            steps,
            is_correct=not no_action and sum(rewards) > 0,
            termination_reason=reason,
            metrics={"turns": float(len(steps)), "no_action": float(no_action)},
        )

    def action_of(self, answer: str) -> Mapping[str, Any]:
        """Returns the action in an answer.

        Raises:
            WrongAction: If the answer is not an action.
        """
        text = action_of(answer)
        if self.config.action_field is not None:
            return {self.config.action_field: text}
        try:
            action = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WrongAction(f"the answer is not JSON: {error}") from error
        if not isinstance(action, dict):
            raise WrongAction(f"the answer is {type(action).__name__}, not an object")
        return action

    def text_of(self, shown: OpenEnvObservation) -> str:
        """Returns the part of an observation that the model sees.

        Raises:
            OpenEnvError: If the observation lacks the field.
        """
        field = self.config.observation_field
        if field is None:
            return json.dumps(shown.observation, ensure_ascii=False)
        if field not in shown.observation:
            raise OpenEnvError(
                f"openenv.observation_field = {field!r}: the observation has the fields {', '.join(shown.observation)}"
            )
        value = shown.observation[field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
