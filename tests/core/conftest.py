"""Toy parsers, and an engine that answers from a list; small enough to reason about token by token."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rllm_core.engine import EngineError, RolloutEngine
from rllm_core.parser import Appended, BaseParser, ParsedCompletion, Termination
from rllm_core.types import FinishReason, TokenOutput

sys.path.append(str(Path(__file__).parents[2] / "docs"))  # for architecture, which reads the imports

END, PAD, MERGED = 1, 2, 9
ROLES = {"system": 3, "user": 4, "assistant": 5, "tool": 6}
TOOLS = 8
FIRST_LETTER = 100


class LetterParser(BaseParser):
    """One token per letter; ``<role> letters <end>`` per message. Renders every turn from scratch."""

    name = "letters"

    @classmethod
    def from_model(cls, path: Any, config: Any = None) -> LetterParser:
        return cls()

    @property
    def tokenizer(self) -> str:
        return "letters"

    def get_stop_token_ids(self) -> tuple[int, ...]:
        return (END, PAD)

    def body(self, message: Any) -> list[int]:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else json.dumps(content)
        return [ROLES[message["role"]], *(FIRST_LETTER + ord(c) for c in text), END]

    def render(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True) -> list[int]:
        ids = [TOOLS] * len(tools or ())
        for message in messages:
            ids += self.body(message)
        return [*ids, ROLES["assistant"]] if add_generation_prompt else ids

    def parse_completion(self, completion_ids: Any, *, prompt_ids: Any = None, tools: Any = None) -> ParsedCompletion:
        letters: list[str] = []
        for token in map(int, completion_ids):
            if token in self.get_stop_token_ids():
                return ParsedCompletion("".join(letters))
            if token >= FIRST_LETTER:
                letters.append(chr(token - FIRST_LETTER))
        return ParsedCompletion("".join(letters), termination=Termination.TRUNCATED)

    def spell(self, ids: Any) -> list[bytes]:
        return [chr(int(token) - FIRST_LETTER).encode() if token >= FIRST_LETTER else b"" for token in ids]


class BridgingParser(LetterParser):
    """Copies prompt and completion unchanged."""

    name = "bridging"
    supports_bridge = True

    def bridge_to_next_turn(
        self, prompt_ids: Any, completion_ids: Any, new_messages: Any, *, tools: Any = None
    ) -> list[int] | None:
        sampled = [int(t) for t in completion_ids]
        close = [] if sampled and sampled[-1] in self.get_stop_token_ids() else [END]
        return [*map(int, prompt_ids), *sampled, *close, *self.render(new_messages)]


class AppendingParser(BridgingParser):
    """Says only what it adds."""

    name = "appending"

    def bridge_to_next_turn(self, prompt_ids: Any, completion_ids: Any, new_messages: Any, *, tools: Any = None) -> Any:
        ids = super().bridge_to_next_turn(prompt_ids, completion_ids, new_messages, tools=tools)
        assert ids is not None
        return Appended(prompt_ids, completion_ids, ids[len(prompt_ids) + len(completion_ids) :])


class NoncompliantParser(BridgingParser):
    """Claims to bridge, but changes the last sampled token."""

    name = "noncompliant"

    def bridge_to_next_turn(
        self, prompt_ids: Any, completion_ids: Any, new_messages: Any, *, tools: Any = None
    ) -> list[int] | None:
        ids = super().bridge_to_next_turn(prompt_ids, completion_ids, new_messages, tools=tools)
        assert ids is not None
        seam = len(prompt_ids) + len(completion_ids) - 1
        return [*ids[:seam], ids[seam] + 1, *ids[seam + 1 :]]


class MergingParser(LetterParser):
    """Renders ``<end><user>`` as one token, as byte-pair encodings merge across boundaries."""

    name = "merging"

    def render(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True) -> list[int]:
        merged: list[int] = []
        for token in super().render(messages, tools=tools, add_generation_prompt=add_generation_prompt):
            if merged and merged[-1] == END and token == ROLES["user"]:
                merged[-1] = MERGED
            else:
                merged.append(token)
        return merged


class ListEngine(RolloutEngine):
    """Returns answers from a list, in order, raising those that are exceptions. Records its calls."""

    name = "list"

    def __init__(self, parser: BaseParser | None, answers: Sequence[Any], *, token_in_token_out: bool = True) -> None:
        self.parser = parser
        self.answers = list(answers)
        self.calls: list[SimpleNamespace] = []
        self._token_in_token_out = token_in_token_out

    @property
    def supports_token_in_token_out(self) -> bool:
        return self._token_in_token_out

    async def get_token_output_from_token_input(
        self, token_input: Any, *, sampling_params: Any, seed: int, is_validation: bool = False
    ) -> TokenOutput:
        self.calls.append(
            SimpleNamespace(
                prompt=[int(t) for t in token_input], params=sampling_params, seed=seed, is_validation=is_validation
            )
        )
        if not self.answers:
            raise EngineError("no answers left")
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, TokenOutput):
            return answer
        stopped = bool(answer) and answer[-1] == END
        return TokenOutput(
            token_ids=answer,
            logprobs=[-0.5] * len(answer),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            weight_version=7,
        )


def letters(text: str, *, end: bool = True) -> list[int]:
    """Returns the tokens of an answer."""
    return [FIRST_LETTER + ord(c) for c in text] + [END] * end


@pytest.fixture(scope="session")
def toys() -> SimpleNamespace:
    return SimpleNamespace(
        LetterParser=LetterParser,
        AppendingParser=AppendingParser,
        BridgingParser=BridgingParser,
        NoncompliantParser=NoncompliantParser,
        MergingParser=MergingParser,
        ListEngine=ListEngine,
        letters=letters,
        END=END,
        PAD=PAD,
    )
