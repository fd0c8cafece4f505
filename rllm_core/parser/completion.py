"""Completions as messages: text, reasoning and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rllm_core.types import FrozenDict, freeze, new_id, well_formed


class Termination(StrEnum):
    """How a completion ended, according to the parser."""

    STOP = "stop"
    TRUNCATED = "truncated"
    MALFORMED = "malformed"


@dataclass(frozen=True)
class ParsedToolCall:
    """One attempt at a tool call. ``status`` is ``"ok"`` or describes the problem."""

    name: str | None
    arguments: Mapping[str, Any] | None
    raw: str
    status: str = "ok"
    call_id: str | None = None


@dataclass(frozen=True)
class ParsedCompletion(Mapping[str, Any]):
    """A completion as a message. Can be read as a dictionary: ``parsed["content"]``, ``.get("reasoning")``, ``in``.

    Attributes:
        content: Text outside reasoning and tool calls; never None.
        reasoning: Reasoning, or None. Use ``parsed.reasoning or ""`` where text is needed.
        tool_calls: All attempted tool calls, well-formed or not.
        termination: ``stop`` if a stop token was sampled; ``malformed`` if it was sampled inside an unfinished
            construct; otherwise ``truncated``.
        reasoning_complete: False if the completion ended inside its reasoning; None without reasoning.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ParsedToolCall, ...] = ()
    termination: Termination = Termination.STOP
    reasoning_complete: bool | None = None

    def __getitem__(self, key: str) -> Any:
        if key not in self.__dataclass_fields__:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dataclass_fields__)

    def __len__(self) -> int:
        return len(self.__dataclass_fields__)

    @property
    def ok_tool_calls(self) -> tuple[ParsedToolCall, ...]:
        """Tool calls that can be executed."""
        return tuple([call for call in self.tool_calls if call.status == "ok"])

    def to_message(self, *, turn: int | str | None = None) -> FrozenDict:
        """Returns the assistant message to append to the conversation (OpenAI format, arguments as a JSON string).

        Args:
            turn: Number or name of the turn, used to build ids for tool calls without one. Templates may print these
                ids, so runs with the same seed need equal ids. Without it, the ids are random.
        """
        message: dict[str, Any] = {"role": "assistant", "content": well_formed(self.content)}
        if self.reasoning is not None:
            message["reasoning_content"] = well_formed(self.reasoning)
        if self.tool_calls and self.ok_tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id or ("call_" + (new_id() if turn is None else f"{turn}_{index}")),
                    "type": "function",
                    "function": {
                        "name": call.name if call.name is None else well_formed(call.name),
                        "arguments": well_formed(json.dumps(call.arguments, default=dict, ensure_ascii=False)),
                    },
                }
                for index, call in enumerate(self.ok_tool_calls)
            ]
        return freeze(message)  # type: ignore[no-any-return]
