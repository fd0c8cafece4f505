"""Reference workflow of the worker protocol: follows instructions in its task; docs/worker-protocol.md defines it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

from rllm_core.engine import Completer, Terminated
from rllm_core.types import Episode, Messages, Step, Task, TerminationReason
from rllm_core.workflow import Split, Workflow

FIRST = "main"


class Reference(Workflow):
    """Follows ``task.data["do"]``, a list of instructions."""

    name: ClassVar[str] = "reference"
    playing: ClassVar[type[Playing]]

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns a task that asks the model once."""
        asks = [["say", FIRST, {"role": "user", "content": "say yes"}], ["ask", FIRST]]
        return [Task(task_id=f"{split}-0", data={"do": asks, "reward": 1.0})]

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Follows the instructions, and returns all steps in one trajectory."""
        playing = self.playing(completer)
        for name, *arguments in task.data["do"]:
            call: Callable[..., Awaitable[None]] = getattr(playing, f"_do_{name}")
            await call(*arguments)
        seen = {
            "task_id": task.task_id,
            "is_validation": completer.is_validation,
            "max_response_tokens": completer.sampling_params.max_response_tokens,
            "seeds": {name: one.completer.seed for name, one in playing.conversations.items()},
            "tokens": [[step.prompt_ids.tolist(), step.completion_ids.tolist()] for step in playing.steps],
            "caught": playing.caught,
        }
        metadata = {"seen": seen, "echo": task.data.get("echo")}
        return self.episode(task, playing.steps, reward=task.data.get("reward"), metadata=metadata)


class _Conversation:
    def __init__(self, completer: Completer) -> None:
        self.completer = completer
        self.messages = Messages()
        self.tools: list[Any] | None = None
        self.limit: int | None = None
        self.stop_texts: list[str] = []

    async def ask(self) -> Step:
        return await self.completer.complete(
            self.messages, tools=self.tools, max_response_tokens=self.limit, stop_texts=self.stop_texts
        )


class Playing:
    """A rollout of `Reference`; its methods ``_do_NAME`` are the instructions."""

    def __init__(self, completer: Completer) -> None:
        self.conversations = {FIRST: _Conversation(completer)}
        self.steps: list[Step] = []
        self.caught: list[str] = []

    def _add(self, conversation: _Conversation, step: Step) -> None:
        conversation.messages.append(step.response)
        self.steps.append(step)

    async def _do_say(self, name: str, message: Any) -> None:
        self.conversations[name].messages.append(message)

    async def _do_quote(self, name: str, step: int) -> None:
        self.conversations[name].messages.append(self.steps[step].response)

    async def _do_keep(self, name: str, number: int) -> None:
        conversation = self.conversations[name]
        conversation.messages = Messages(conversation.messages[:number])

    async def _do_tools(self, name: str, tools: Any) -> None:
        self.conversations[name].tools = tools

    async def _do_limit(self, name: str, tokens: int | None) -> None:
        self.conversations[name].limit = tokens

    async def _do_stop(self, name: str, texts: list[str]) -> None:
        self.conversations[name].stop_texts = texts

    async def _do_fork(self, name: str, new: str) -> None:
        self.conversations[new] = _Conversation(self.conversations[name].completer.fork())

    async def _do_branch(self, name: str, new: str, step: int, key: str | None) -> None:
        after = self.steps[step]
        branch = _Conversation(self.conversations[name].completer.fork(after=after, key=key))
        branch.messages = Messages(after.messages)
        branch.messages.append(after.response)
        self.conversations[new] = branch

    async def _do_ask(self, *names: str) -> None:
        asked = [self.conversations[name] for name in names]
        for conversation, step in zip(asked, await asyncio.gather(*(one.ask() for one in asked)), strict=True):
            self._add(conversation, step)

    async def _do_try(self, name: str) -> None:
        conversation = self.conversations[name]
        try:
            self._add(conversation, await conversation.ask())
        except Exception as error:  # any exception that a call can raise
            self.caught.append(str(error))

    async def _do_give_up(self, name: str) -> None:
        asking = asyncio.create_task(self.conversations[name].ask())
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])

    async def _do_reward(self, step: int, reward: float) -> None:
        self.steps[step].reward = reward

    async def _do_print(self, text: str) -> None:
        print(text)

    async def _do_compute(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    async def _do_wait(self) -> None:
        await asyncio.Event().wait()

    async def _do_fail(self, message: str) -> None:
        raise RuntimeError(message)

    async def _do_end(self, reason: str, message: str) -> None:
        raise Terminated(TerminationReason(reason), message)


Reference.playing = Playing
