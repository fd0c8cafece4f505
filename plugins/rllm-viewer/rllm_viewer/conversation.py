"""A conversation with a trained model, with the run's own engine, parser and tools, in a token-exact session."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rllm_core.assembly.parts import parts_of
from rllm_core.config import RunConfig
from rllm_core.engine import EngineError, RolloutEngine, Terminated, TITOCompleter
from rllm_core.errors import RunError
from rllm_core.plugins import PluginManager
from rllm_core.runs import evaluation, launch
from rllm_core.text import printable
from rllm_core.types import MessageLike, SamplingParams
from rllm_core.workflow import ChatTools
from rllm_viewer.runs import checkpoint_of, resolved_run

MAX_CALLS = 32


class Conversation:
    """A conversation that keeps all its messages.

    Args:
        engine: Engine with the trained weights.
        config: Run file of the run; the model is sampled as in its validations.
        tools: Tools of the workflow; None if it has none.
        note: Receives a line for every tool call.
    """

    def __init__(
        self, engine: RolloutEngine, config: RunConfig, tools: ChatTools | None, note: Callable[[str], None]
    ) -> None:
        self.messages: list[MessageLike] = []
        self._tools = tools
        self._note = note
        self._completer = TITOCompleter(
            engine,
            sampling_params=SamplingParams(
                temperature=config.rollout.validation_temperature,
                max_response_tokens=config.rollout.max_response_tokens,
            ),
            seed=config.training.seed,
            is_validation=True,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
        )

    async def answer(self, text: str) -> str:
        """Sends a message, executes the model's tool calls, and returns its answer.

        Raises:
            RunError: If the engine fails, the conversation is too long, or the model does not stop calling tools.
        """
        self.messages.append({"role": "user", "content": text})
        specs = (self._tools.specs if self._tools is not None else ()) or None
        for _ in range(MAX_CALLS):
            try:
                step = await self._completer.complete(self.messages, tools=specs)
            except (EngineError, Terminated) as error:
                raise RunError(f"the model cannot answer: {error}") from error
            self.messages.append(step.response)
            calls = step.response.get("tool_calls") or ()
            if calls and self._tools is None:
                self._note("the model called a tool, but its workflow offers none in chat")
            if not calls or self._tools is None:
                return step.text
            for call in calls:
                self.messages.append(await self._called(self._tools, call))
        raise RunError(f"the model called tools {MAX_CALLS} times without an answer")

    async def _called(self, tools: ChatTools, call: Any) -> MessageLike:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        result = await tools.call(name, json.loads(arguments))
        self._note(printable(f"{name}({arguments}) -> {result}"))
        return {"role": "tool", "tool_call_id": call["id"], "content": result}


@asynccontextmanager
async def conversation(
    run: Path, plugins: PluginManager, *, step: int | None, note: Callable[[str], None]
) -> AsyncIterator[Conversation]:
    """Opens the run's workflow, and its engine with the weights of a checkpoint.

    Args:
        run: Run folder.
        plugins: Plugins, including those of the run.
        step: Step of the checkpoint. None for the latest complete one.
        note: Receives a line for every tool call, and for everything that fails to close.
    """
    parts, saved = parts_of(resolved_run(run, plugins)), checkpoint_of(run, step)
    config = parts.config
    async with (
        evaluation.engine_of_backend(parts, saved) as opened,
        launch.opened(parts.workflow, config, note),
    ):
        tools = parts.workflow.chat_tools(config.training.seed)
        yield Conversation(opened.engine, config, tools, note)
