"""Harmony (gpt-oss): an answer is several messages, each in a channel; calls are messages to a recipient.

Parses text with visible special tokens, so only the model's own tokenizer is needed.
"""

from __future__ import annotations

import re

from rllm_core.parser import ParsedCompletion, ParsedToolCall
from rllm_renderers.formats.tool_format import Schemas, ToolFormat, checked_call, termination

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
# Calls end with a different token from messages, which not every model folder lists as a stop token.
_ENDS = re.compile(r"<\|(?:end|call)\|>")
_HEADER = re.compile(
    r"(?:assistant)?(?:\s*+to=(?P<early>[^\s<]+))?"
    r"\s*+(?:<\|channel\|>\s*+(?P<channel>analysis|commentary|final)\b(?:\s*+to=(?P<late>[^\s<]+))?)?"
    r"\s*+(?:<\|constrain\|>)?(?:json|code)?\s*"
)
_FUNCTIONS = "functions."


class Harmony(ToolFormat):
    """The channel ``analysis`` holds reasoning, the other channels hold content.

    A message to any recipient but ``assistant`` is a call, whose name loses the prefix ``functions.``. A message with a
    missing, unknown or unfinished header is content, unchanged.
    """

    name = "harmony"
    signs = (CHANNEL,)

    def opened_by(self, prompt_end: str) -> str:
        """See `ToolFormat.opened_by`; returns the header of a message that the prompt began."""
        _, start, header = prompt_end.rpartition(START)
        return header.removeprefix("assistant") if start and END not in header else ""

    def read(
        self, text: str, *, stopped: bool, opened_by_prompt: str = "", schemas: Schemas | None = None
    ) -> ParsedCompletion:
        """See `ToolFormat.read`."""
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[ParsedToolCall] = []
        complete: bool | None = None
        messages = (opened_by_prompt + text).split(START)
        for number, message in enumerate(messages):
            header, begun, body = message.partition(MESSAGE)
            ended = _ENDS.search(body)
            end, after = ("", "") if ended is None else (ended[0], body[ended.end() :])
            body = body if ended is None else body[: ended.start()]
            read = _HEADER.fullmatch(header)
            recipient = (read["early"] or read["late"]) if read is not None else None
            is_last = number == len(messages) - 1
            raw = START * (number > 0) + message
            if recipient is not None and recipient != "assistant":
                if begun and (end or (is_last and stopped)):
                    calls.append(checked_call(recipient.removeprefix(_FUNCTIONS), body, raw, schemas))
                else:
                    calls.append(ParsedToolCall(None, None, raw, "unclosed_block"))
            elif not begun or read is None:
                content.append(raw)
            elif read["channel"] == "analysis":
                reasoning.append(body.strip())
                complete = bool(end) or not is_last
                content.append(after)
            else:
                content.append(body + after)
        has_constructs = complete is not None or calls
        joined = "".join(content)
        return ParsedCompletion(
            joined.strip() if has_constructs else joined,
            reasoning="\n".join(reasoning) if complete is not None else None,
            tool_calls=tuple(calls),
            termination=termination(stopped, calls, complete),
            reasoning_complete=complete,
        )

    def split_calls(self, text: str, schemas: Schemas | None) -> tuple[str, tuple[ParsedToolCall, ...]]:
        """See `ToolFormat.split_calls`."""
        parsed = self.read(text, stopped=True, schemas=schemas)
        return parsed.content, parsed.tool_calls
