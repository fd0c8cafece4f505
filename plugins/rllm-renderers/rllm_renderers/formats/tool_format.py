"""What a format of tool calls is: it reads a completion as a message, and raises on nothing that a model writes.

Every attempt at a call is reported with a status:

* ``ok``: it can be executed;
* ``invalid_json``: its arguments (or all of it) are not JSON, or not of the type its schema asks for;
* ``unclosed_block``: it began and never ended;
* ``missing_name``: it names no function;
* ``malformed_structure``: it is well written, but not a call;
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
"""The JSON schemas of the tools' parameters: by tool, then by parameter."""


def schemas_of(tools: Sequence[ToolSpec]) -> Schemas:
    """Of specifications, flat or in OpenAI's envelope."""
    return {
        str(function.get("name", "")): (function.get("parameters") or {}).get("properties") or {}
        for function in (tool.get("function", tool) for tool in tools)
    }


class ToolFormat(ABC):
    """How a family of models writes tool calls and reasoning.

    Attributes:
        name: What the run file calls it.
        signs: Texts one of which stands in every template that writes this format.
        openings: Texts that begin a call wherever they stand, also in reasoning, which they end.
        reasoning_tags: What begins and ends reasoning.
    """

    name: str
    signs: ClassVar[tuple[str, ...]] = ()
    openings: tuple[str, ...] = ()
    reasoning_tags: tuple[str, str] = ("<think>", "</think>")

    def variants(self, written: str) -> Iterator[ToolFormat]:
        """This format with other tags, as they stand around the call in ``written``."""
        return iter(())

    def as_written(self, written: str) -> Self:
        """This format as strict as a template is that writes calls like ``written``."""
        return self

    def with_reasoning_tags(self, tags: tuple[str, str]) -> Self:
        """The same format with other tags around reasoning."""
        changed = copy.copy(self)
        changed.reasoning_tags = tags
        return changed

    def read(
        self, text: str, *, stopped: bool, opened_by_prompt: str = "", schemas: Schemas | None = None
    ) -> ParsedCompletion:
        """Read a completion without its stop token.

        Args:
            text: What was sampled before the first stop token.
            stopped: Whether a stop token was sampled.
            opened_by_prompt: What the prompt already began of the answer (see `opened_by`).
            schemas: The tools a call may name; None allows all.

        Returns:
            The message. Text without any construct is its content unchanged; otherwise content and reasoning are
            stripped of white space at their edges. A tool call inside the reasoning ends the reasoning. Reasoning
            that never ends leaves no content.
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
        """The part of a prompt's end with which the answer already begins: an opened reasoning, or nothing."""
        begin, end = self.reasoning_tags
        _, tag, after = prompt_end.rpartition(begin)
        return tag if tag and end not in after and not after.strip() else ""

    @abstractmethod
    def split_calls(self, text: str, schemas: Schemas | None) -> tuple[str, tuple[ParsedToolCall, ...]]:
        """The text outside of tool calls, and the calls."""

    def _split_reasoning(self, text: str, opened_by_prompt: bool) -> tuple[str | None, str, bool | None]:
        """The reasoning, what follows it, and whether it ended; reasoning counts only at the very beginning."""
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
    """Split a text at what opens calls.

    Args:
        text: The text.
        opening: What calls begin with.
        read: From an opening to where its calls end, and these calls.

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
    """Where nothing is known about calls: all text is content."""

    name = "none"

    def split_calls(self, text: str, schemas: Schemas | None) -> tuple[str, tuple[ParsedToolCall, ...]]:
        """See `ToolFormat.split_calls`."""
        return text, ()


def termination(stopped: bool, calls: Sequence[ParsedToolCall], reasoning_complete: bool | None) -> Termination:
    """How a completion ended, given what was read from it."""
    if not stopped:
        return Termination.TRUNCATED
    unfinished = reasoning_complete is False or any(call.status == "unclosed_block" for call in calls)
    return Termination.MALFORMED if unfinished else Termination.STOP


_KEYS = frozenset({"name", "id", "type"})  # what a call may have besides its arguments


def call_of_object(
    value: Any, raw: str, schemas: Schemas | None, *, arguments_keys: Sequence[str] = ("arguments",)
) -> ParsedToolCall:
    """A call written as one JSON object: its name, its arguments (perhaps as JSON in a string), perhaps an id.

    A function that takes nothing may be called without arguments. What stands under another key is meant for something,
    so a call with such a key in their place has none that could be executed.
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
    """A call, with its status; arguments in a string are read as JSON."""
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
