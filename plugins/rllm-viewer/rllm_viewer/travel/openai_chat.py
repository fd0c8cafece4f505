"""``openai``: rows for OpenAI's supervised fine-tuning, one conversation each.

A row has ``messages``, and ``tools`` if there were any; nothing else is allowed. An assistant message that the policy
did not sample has ``"weight": 0``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rllm_viewer.travel import columns
from rllm_viewer.travel.contract import Format, Imported, Located, Row, Source
from rllm_viewer.travel.conversations import JsonMessage, conversations_of, steps_from, with_weights
from rllm_viewer.travel.fields import TEXT, Losses
from rllm_viewer.travel.selection import Picked

KEYS = {
    "system": ("role", "content", "name"),
    "developer": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "tool_calls", "weight", "refusal"),
    "tool": ("role", "content", "tool_call_id"),
}
PARTS = {"text": str, "image_url": Mapping}


def rows(chosen: Iterable[Picked], _: Source, losses: Losses) -> Iterator[Row]:
    """Yields one row per conversation of a trained trajectory."""
    for one in chosen:
        for _number, trajectory in columns.trained(one, losses):
            for conversation in conversations_of(trajectory.steps, losses):
                messages = with_weights(conversation)
                if not all(map(_is_allowed, messages)):
                    losses.add("conversation (with a role or a content that the format does not know)")
                    continue
                row: Row = {"messages": [_message(message, losses) for message in messages]}
                if conversation.tools:
                    row["tools"] = conversation.tools
                yield row


def _is_allowed(message: JsonMessage) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return message["role"] in KEYS and all(
        isinstance(part, Mapping)
        and part.get("type") in PARTS
        and isinstance(part.get(part["type"]), PARTS[part["type"]])
        for part in parts
    )


def _message(message: JsonMessage, losses: Losses) -> JsonMessage:
    known = KEYS[message["role"]]
    losses.unread(f"message of {message['role']}", message, known)
    written = {key: value for key, value in message.items() if key in known and value is not None}
    if message["role"] == "assistant" and not written.get("tool_calls"):
        written.pop("tool_calls", None)
        written.setdefault("content", "")
    return written


def read(located: Iterable[Located], losses: Losses) -> Iterator[Imported]:
    """Yields the steps of each row: one per assistant message, unless its weight is 0."""
    for one in located:
        losses.unread("row", one.row, ("messages", "tools"))
        messages = columns.messages_of(one, "messages")
        yield Imported(one.where, steps_from(messages, columns.json_column(one, "tools", list)))


FORMAT = Format("openai", "OpenAI's supervised fine-tuning: messages and tools", TEXT, (".jsonl",), rows, read)
