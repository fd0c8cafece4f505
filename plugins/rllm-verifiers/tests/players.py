"""A policy with answers of a function, and rollouts of verifiers' environments with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rllm_verifiers.config import VerifiersConfig
from rllm_verifiers.workflow import VerifiersWorkflow

from rllm_core.engine import TITOCompleter
from rllm_core.parser import ParsedCompletion, ParsedToolCall, Termination
from rllm_core.types import Episode, FinishReason, SamplingParams, Task, TokenOutput
from rllm_devkit.scripted import ByteParser, ScriptedEngine

TASKSETS = Path(__file__).parent / "tasksets"
Answer = Callable[[str, int], str | Exception]


class CallParser(ByteParser):
    """Reads completions that are JSON with calls: ``{"content": ..., "calls": [[name, arguments], ...]}``."""

    supports_tools = True
    supports_bridge = True

    def parse_completion(self, completion_ids: Any, **more: Any) -> ParsedCompletion:
        """See `BaseParser.parse_completion`."""
        plain = super().parse_completion(completion_ids, **more)
        try:
            said = json.loads(plain.content)
            calls = tuple(ParsedToolCall(name, given, json.dumps(given)) for name, given in said["calls"])
        except (ValueError, TypeError, KeyError):
            return plain
        return ParsedCompletion(said["content"], None, calls, Termination.STOP, None)

    def render(self, messages: Any, **more: Any) -> list[int]:
        """See `BaseParser.render`; writes calls, too."""
        return super().render([{"role": one["role"], "content": _written(one)} for one in messages], **more)


def _written(message: Any) -> str:
    calls = message.get("tool_calls")
    return (message.get("content") or "") + (json.dumps(calls) if calls else "")


def calling(*calls: tuple[str, Any]) -> str:
    """Returns a completion with calls, spelled as no serializer would."""
    return json.dumps({"calls": calls, "content": ""}, indent=1)


class Policy(ScriptedEngine):
    """Says what a function of the prompt and the seed returns, one token per byte, and remembers what it was asked."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(CallParser())
        self.asked: list[tuple[list[int], list[int]]] = []
        self.running = self.most = 0
        self._said = answer

    async def get_token_output_from_token_input(self, token_input: Any, *, sampling_params: Any, **more: Any) -> Any:
        """See `RolloutEngine.get_token_output_from_token_input`."""
        prompt = [int(token) for token in token_input]
        said = self._said(bytes(token for token in prompt if token < 256).decode(errors="replace"), more["seed"])
        if isinstance(said, Exception):
            raise said
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        ids = [*said.encode(), CallParser.END][: sampling_params.max_response_tokens]
        self.asked.append((prompt, ids))
        reason = FinishReason.STOP if ids[-1] == CallParser.END else FinishReason.LENGTH
        logprobs = -np.linspace(0.1, 1, len(ids), dtype=np.float32)
        return TokenOutput(token_ids=ids, logprobs=logprobs, finish_reason=reason, weight_version=0)


def workflow(name: str, **config: Any) -> VerifiersWorkflow:
    """Returns the workflow with a taskset of these tests."""
    return VerifiersWorkflow(VerifiersConfig(environment=str(TASKSETS / f"{name}.py"), **config))


@asynccontextmanager
async def opened(played: VerifiersWorkflow) -> AsyncIterator[VerifiersWorkflow]:
    """Opens a workflow."""
    try:
        await played.open()
        yield played
    finally:
        await played.close()


async def play(
    played: VerifiersWorkflow, task: Task, policy: Policy, *, seed: int = 0, max_response_tokens: int = 300
) -> Episode:
    """Plays one rollout."""
    params = SamplingParams(max_response_tokens=max_response_tokens)
    return await played.run(task, TITOCompleter(policy, seed=seed, sampling_params=params))


def shown(episode: Episode) -> Any:
    """Returns all of an episode that does not depend on when it was played."""
    return [
        (
            one.role,
            one.reward,
            one.trainable,
            [(step.prompt_ids.tolist(), step.completion_ids.tolist(), step.segment) for step in one.steps],
        )
        for one in episode.trajectories
    ]


def check_exact(policy: Policy, episodes: Sequence[Episode]) -> None:
    """Checks that every step has the tokens that the engine was asked and gave, in one segment per trajectory."""
    steps = [step for episode in episodes for one in episode.trajectories for step in one.steps]
    assert steps
    for step in steps:
        assert (step.prompt_ids.tolist(), step.completion_ids.tolist()) in policy.asked
        assert step.segment == 0
        assert step.logprobs is not None
        assert len(step.logprobs) == len(step.completion_ids)
