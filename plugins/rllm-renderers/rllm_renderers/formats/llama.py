"""Llama 3: ``{"name": ..., "parameters": {...}}`` instead of an answer, optionally after ``<|python_tag|>``."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Self

from rllm_core.parser import ParsedToolCall
from rllm_renderers.formats.json_text import UnfinishedJson, json_at
from rllm_renderers.formats.tool_format import Schemas, ToolFormat, call_of_object

TAG = "<|python_tag|>"
_ATTEMPT = re.compile(r'\s*\{\s*"(?:name|type|function)"')
_BETWEEN = re.compile(r"\s*+(?:(?:;|,|<\|python_tag\|>)\s*+)?(?=\{)")


class Llama(ToolFormat):
    """Bare JSON objects, separated by ``;``.

    Without the tag, an answer is a call if it begins with a JSON object with ``name`` and ``parameters``, or with text
    that can only be the beginning of one. Other JSON is content.
    """

    name = "llama"
    signs = (TAG,)
    openings = (TAG,)
    arguments_keys: tuple[str, ...] = ("parameters", "arguments")

    def as_written(self, written: str) -> Self:
        """See `ToolFormat.as_written`; accepts only the key that the template writes."""
        changed = copy.copy(self)
        changed.arguments_keys = tuple(key for key in self.arguments_keys if f'"{key}"' in written)
        return changed if changed.arguments_keys else self

    def split_calls(self, text: str, schemas: Schemas | None) -> tuple[str, tuple[ParsedToolCall, ...]]:
        """See `ToolFormat.split_calls`."""
        before, tag, _ = text.partition(TAG)
        if tag:
            calls, end = self._calls_at(text, len(before), len(before) + len(tag), schemas, is_tagged=True)
            return before + text[end:], calls
        calls, end = self._calls_at(text, 0, 0, schemas, is_tagged=False)
        return text[end:], calls

    def _calls_at(
        self, text: str, start: int, position: int, schemas: Schemas | None, *, is_tagged: bool
    ) -> tuple[tuple[ParsedToolCall, ...], int]:
        """Returns the consecutive calls from ``position``, and their end. The first raw text begins at ``start``."""
        calls: list[ParsedToolCall] = []
        while True:
            try:
                value, end = json_at(text, position)
            except ValueError as error:
                if not is_tagged and not _ATTEMPT.match(text, position):
                    break
                status = "unclosed_block" if isinstance(error, UnfinishedJson) else "invalid_json"
                calls.append(ParsedToolCall(None, None, text[start:], status))
                start = len(text)
                break
            if not is_tagged and not _is_call(value):
                break
            between = _BETWEEN.match(text, end)
            position = between.end() if between is not None else end
            calls.append(call_of_object(value, text[start:position], schemas, arguments_keys=self.arguments_keys))
            start = position
            if between is None:
                break
        return tuple(calls), start


def _is_call(value: object) -> bool:
    return isinstance(value, Mapping) and "name" in value and any(key in value for key in Llama.arguments_keys)
