"""Base of tool-call formats, which parse a completion as a message and never raise on model output.

Every attempted call is reported with a status:

* ``ok``: the call can be executed;
* ``invalid_json``: the arguments or the call are not JSON, or not of the type that the schema requires;
* ``unclosed_block``: the call has no end;
* ``missing_name``: the call names no function;
* ``malformed_structure``: the syntax is valid, but it is not a call;
* ``unknown_tool``: no tool of this name was offered.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from rllm_core.parser import ParsedCompletion, ParsedToolCall, Termination, ToolSpec
from rllm_renderers.formats.json_text import read_json

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the tools' parameters, by tool and parameter."""


def schemas_of(tools: Sequence[ToolSpec]) -> Schemas:
    """Returns the schemas of tool specifications, flat or in OpenAI's envelope."""
    return {
        str(function.get("name", "")): (function.get("parameters") or {}).get("properties") or {}
        for function in (tool.get("function", tool) for tool in tools)
    }


class ToolFormat(ABC):
    """The format of tool calls and reasoning of a model family.

    Attributes:
        name: Name in the run file.
        signs: Texts of which every template with this format contains at least one.
        openings: Texts that begin a call anywhere, including in reasoning, which they end.
        reasoning_tags: Tags around reasoning.
    """

    name: str
    signs: ClassVar[tuple[str, ...]] = ()
    openings: tuple[str, ...] = ()
    reasoning_tags: tuple[str, str] = ("<think>", "</think>")

    def variants(self, written: str) -> Iterator[ToolFormat]:
        """Yields this format with other tags, those around the call in ``written``."""
        return iter(())

    def as_written(self, written: str) -> Self:
        """Returns this format, restricted to calls as in ``written``."""
        return self

    def with_reasoning_tags(self, tags: tuple[str, str]) -> Self:
        """Returns this format with other tags around reasoning."""
        changed = copy.copy(self)
        changed.reasoning_tags = tags
        return changed

    def read(
        self, text: str, *, stopped: bool, opened_by_prompt: str = "", schemas: Schemas | None = None
    ) -> ParsedCompletion:
        """Parses a completion without its stop token.

        Args:
            text: Text sampled before the first stop token.
            stopped: Whether a stop token was sampled.
            opened_by_prompt: Beginning of the answer that the prompt already contains (see `opened_by`).
            schemas: Tools a call may name; None allows all.

        Returns:
            The message. Text without calls and reasoning is returned as content, unchanged. Otherwise, surrounding
            white space is stripped from content and reasoning. A tool call inside reasoning ends the reasoning.
            Unfinished reasoning leaves no content.
        """
        reasoning, rest, complete = self._split_reasoning(text, bool(opened_by_prompt))
        content, calls = self.split_calls(rest, schemas)
        has_constructs = reasoning is not None or calls
        return ParsedCompletion(
            content.strip() if has_constructs else content,
            reasoning=reasoning,
            tool_calls=calls,
            termination=termination(stopped, calls, complete),
            reasoning_complete=complete,
        )

    def opened_by(self, prompt_end: str) -> str:
        """Returns the part of the prompt's end that begins the answer: an opening reasoning tag, or nothing."""
        begin, end = self.reasoning_tags
        _, tag, after = prompt_end.rpartition(begin)
        return tag if tag and end not in after and not after.strip() else ""

    @abstractmethod
    def split_calls(self, text: str, schemas: Schemas | None) -> tuple[str, tuple[ParsedToolCall, ...]]:
        """Returns the text outside of tool calls, and the calls."""

    def _split_reasoning(self, text: str, opened_by_prompt: bool) -> tuple[str | None, str, bool | None]:
        """Returns the reasoning, the rest, and whether the reasoning ended. Reasoning must begin the text."""
        begin, end = self.reasoning_tags
        body = text.lstrip()
        if body.startswith(begin):
            body = body[len(begin) :]
        elif opened_by_prompt:
            body = text
        else:
            return None, text, None
        ends_at = body.find(end)
        calls_at = [at for at in map(body.find, self.openings) if at >= 0]
        if calls_at and (ends_at < 0 or min(calls_at) < ends_at):
            return body[: min(calls_at)].strip(), body[min(calls_at) :], True
        if ends_at < 0:
            return body.strip(), "", False
        return body[:ends_at].strip(), body[ends_at + len(end) :], True


def scan_calls(
    text: str, opening: re.Pattern[str], read: Callable[[re.Match[str]], tuple[int, Sequence[ParsedToolCall]]]
) -> tuple[str, tuple[ParsedToolCall, ...]]:
    """Splits a text at the openings of calls.

    Args:
        text: Text to split.
        opening: Pattern at the beginning of calls.
        read: Function from an opening to the end of its calls, and the calls.

    Returns:
        The text outside of the calls, and the calls.
    """
    outside: list[str] = []
    calls: list[ParsedToolCall] = []
    position = 0
    while (found := opening.search(text, position)) is not None:
        outside.append(text[position : found.start()])
        position, read_here = read(found)
        calls += read_here
    outside.append(text[position:])
    return "".join(outside), tuple(calls)


class NoCalls(ToolFormat):
    """The format for unknown calls: all text is content."""

    name = "none"

    def split_calls(self, text: str, schemas: Schemas | None) -> tuple[str, tuple[ParsedToolCall, ...]]:
        """See `ToolFormat.split_calls`."""
        return text, ()


def termination(stopped: bool, calls: Sequence[ParsedToolCall], reasoning_complete: bool | None) -> Termination:
    """Returns how a completion ended, given its parsed parts."""
    if not stopped:
        return Termination.TRUNCATED
    unfinished = reasoning_complete is False or any(call.status == "unclosed_block" for call in calls)
    return Termination.MALFORMED if unfinished else Termination.STOP


_KEYS = frozenset({"name", "id", "type"})  # Allowed keys besides the arguments.


def call_of_object(
    value: Any, raw: str, schemas: Schemas | None, *, arguments_keys: Sequence[str] = ("arguments",)
) -> ParsedToolCall:
    """Returns a call from one JSON object with a name, arguments (also as JSON in a string) and an optional id.

    A function without parameters may be called without arguments. If there is an unknown key instead of arguments, the
    call cannot be executed, because the key's value was meant for something.
    """
    if not isinstance(value, Mapping):
        return ParsedToolCall(None, None, raw, "malformed_structure")
    written = [key for key in arguments_keys if key in value]
    arguments: Any = value[written[0]] if written else {} if _KEYS.issuperset(value) else None
    call_id = value.get("id")
    return checked_call(value.get("name"), arguments, raw, schemas, call_id if isinstance(call_id, str) else None)


def checked_call(
    name: Any, arguments: Any, raw: str, schemas: Schemas | None, call_id: str | None = None
) -> ParsedToolCall:
    """Returns a call with its status; arguments in a string are parsed as JSON."""
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError:
            return ParsedToolCall(name if _is_name(name) else None, None, raw, "invalid_json", call_id)
    if not _is_name(name):
        return ParsedToolCall(None, None, raw, "missing_name", call_id)
    if not isinstance(arguments, Mapping):
        return ParsedToolCall(name, None, raw, "malformed_structure", call_id)
    known = schemas is None or name in schemas
    return ParsedToolCall(name, arguments, raw, "ok" if known else "unknown_tool", call_id)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name)
