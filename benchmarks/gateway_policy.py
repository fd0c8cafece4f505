"""The policies of `benchmarks.gateway`: a parser of bytes that reads tool calls, and engines with known completions."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from benchmarks.bytes_parser import Bytes
from rllm_core.parser import ParsedCompletion, ParsedToolCall, Termination
from rllm_core.types import FinishReason, Floats, MessageLike, SamplingParams, TokenIds, TokenOutput
from rllm_devkit.scripted import ByteParser, ScriptedEngine

WORDS = "a word of someone, " * 1000


class CallParser(Bytes):
    """Reads completions that are JSON: ``{"content": ..., "reasoning": ..., "calls": [[name, arguments], ...]}``."""

    supports_tools = True

    def parse_completion(self, completion_ids: Any, **more: Any) -> ParsedCompletion:
        """See `BaseParser.parse_completion`."""
        ids = np.asarray(completion_ids)
        said = json.loads(ids[ids < ByteParser.START].astype(np.uint8).tobytes())
        calls = tuple(ParsedToolCall(name, arguments, json.dumps(arguments)) for name, arguments in said["calls"])
        is_complete = None if said["reasoning"] is None else True
        return ParsedCompletion(said["content"], said["reasoning"], calls, Termination.STOP, is_complete)

    def render(self, messages: Sequence[MessageLike], **more: Any) -> list[int]:
        """See `BaseParser.render`; writes calls and reasoning, too."""
        return super().render([{"role": one["role"], "content": _written(one)} for one in messages], **more)


def _written(message: MessageLike) -> str:
    more = {key: message[key] for key in ("reasoning_content", "tool_calls", "tool_call_id") if message.get(key)}
    content = message.get("content") or ""
    return (content if isinstance(content, str) else json.dumps(content)) + (json.dumps(more) if more else "")


def said(content: str, reasoning: str | None = None, *calls: tuple[str, Any]) -> bytes:
    """Returns a completion whose JSON has odd spaces, as no template would write it."""
    return json.dumps({"calls": calls, "reasoning": reasoning, "content": content}, indent=1).encode()


class Prompt(ScriptedEngine):
    """Answers at once, always with the same text.

    Args:
        characters: Length of the text.
    """

    def __init__(self, characters: int) -> None:
        super().__init__(CallParser())
        self.text = WORDS[:characters]
        self._ids = np.array([*said(self.text), ByteParser.END], np.int32)

    async def get_token_output_from_token_input(self, token_input: Any, **more: Any) -> TokenOutput:
        """See `RolloutEngine.get_token_output_from_token_input`."""
        return output(self._ids, np.full(len(self._ids), -0.5, np.float32))


class Gate(ScriptedEngine):
    """Answers calls by repeating their last message, once enough calls wait or a time limit expires.

    Args:
        calls: Number of calls to wait for.
        seconds: Time limit of the wait.

    Attributes:
        most: Maximum number of calls that have waited at once.
    """

    def __init__(self, calls: int, seconds: float) -> None:
        super().__init__(CallParser())
        self.most = 0
        self._calls, self._seconds = calls, seconds
        self._open = asyncio.Event()

    async def get_token_output_from_token_input(self, token_input: Any, **more: Any) -> TokenOutput:
        """See `RolloutEngine.get_token_output_from_token_input`."""
        self.most += 1
        if self.most == self._calls:
            self._open.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._open.wait(), self._seconds)
        asked = np.array(token_input)
        [*_, last] = bytes(asked[asked < ByteParser.START].astype(np.uint8)).decode().partition("user\n")
        ids = np.array([*said(last.removesuffix("assistant\n")), ByteParser.END], np.int32)
        return output(ids, np.full(len(ids), -0.5, np.float32))


def output(ids: TokenIds, logprobs: Floats) -> TokenOutput:
    """Returns a completion that has ended."""
    return TokenOutput(token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP, weight_version=0)


class Given(NamedTuple):
    """A completion that the engine gave.

    Attributes:
        rollout: Rollout for which it was asked.
        prompt: Prompt of the call.
        completion: Sampled tokens.
        logprobs: Log-probabilities, which no other completion has.
    """

    rollout: int
    prompt: TokenIds
    completion: TokenIds
    logprobs: Floats

    @property
    def key(self) -> tuple[bytes, bytes, bytes]:
        """All fields except the rollout."""
        return self.prompt.tobytes(), self.completion.tobytes(), self.logprobs.tobytes()


class ShufflingEngine(ScriptedEngine):
    """Answers waiting calls in random order. Every answer has its number in its text: ``[n17]``.

    Args:
        seed: Seed of the order in which calls are answered, and of the answers.

    Attributes:
        given: All completions, in order.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(CallParser())
        self.given: list[Given] = []
        self._random = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self._waiting: list[asyncio.Future[None]] = []

    async def answer_in_random_order(self) -> None:
        """Answers one call per tick, forever."""
        while True:
            await asyncio.sleep(0)
            if self._waiting:
                at = self._random.randrange(len(self._waiting))
                self._waiting[at], self._waiting[-1] = self._waiting[-1], self._waiting[at]
                chosen = self._waiting.pop()
                if not chosen.done():
                    chosen.set_result(None)

    async def sample(self, rollout: int, prompt: TokenIds) -> TokenOutput:
        """Waits for its turn, and returns a completion."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn
        content = f"[n{len(self.given)}] word é" + " word" * self._random.randrange(4)
        calls = [("add", {"b": 4, "a": at}) for at in range(self._random.choice((0, 0, 1, 2)))]
        text = said(content, self._random.choice((None, "hm, so")), *calls)
        completion = np.array([*text, ByteParser.END], np.int32)
        logprobs = -self._numbers.random(len(completion), np.float32)
        self.given.append(Given(rollout, prompt, completion, logprobs))
        return output(completion, logprobs)

    def of_rollout(self, rollout: int) -> OfRollout:
        """Returns the source of completions for one rollout."""
        return OfRollout(self, rollout)


class OfRollout:
    """A source of completions for one rollout.

    Args:
        engine: The engine.
        rollout: Number of the rollout.
    """

    def __init__(self, engine: ShufflingEngine, rollout: int) -> None:
        self.engine = engine
        self._rollout = rollout

    async def get_token_output_from_token_input(
        self, token_input: Any, *, sampling_params: SamplingParams, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        """See `RolloutEngine.get_token_output_from_token_input`."""
        return await self.engine.sample(self._rollout, np.array(token_input, np.int32))
