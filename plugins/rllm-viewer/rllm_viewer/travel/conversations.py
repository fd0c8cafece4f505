"""Splits a trajectory into conversations, and makes steps from imported conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllm_core.messages import identical
from rllm_core.parser.same_message import same_message
from rllm_core.types import Message, Step, thaw
from rllm_viewer.travel.fields import Losses

JsonMessage = dict[str, Any]


@dataclass(frozen=True)
class StepConversation:
    """Steps of a trajectory that continue each other, both in tokens and in messages.

    Attributes:
        messages: All messages, including the last answer.
        sampled: Position of the answer of each step in ``messages``.
        steps: The steps.
        positions: Their positions in the trajectory.
        reworded: Number of answers that a client sent back in other words; ``messages`` has the sampled words.
    """

    messages: Sequence[Message]
    sampled: Sequence[int]
    steps: Sequence[Step]
    positions: Sequence[int]
    reworded: int

    @property
    def tools(self) -> list[Any]:
        """Tools that the prompts offer, as JSON data."""
        return thaw(self.steps[0].tools)  # type: ignore[no-any-return]

    def json_messages(self) -> list[JsonMessage]:
        """Returns the messages as JSON data."""
        return [thaw(message) for message in self.messages]


@dataclass(frozen=True)
class ToolCall:
    """A tool call of a message; what has another type than it should is left out.

    Attributes:
        arguments: JSON text in most messages, JSON data in some.
    """

    call_id: str
    name: str
    arguments: Any

    @classmethod
    def of(cls, call: Any, at: int) -> ToolCall:
        """Reads the call at position ``at`` of a message; the position serves as the id of a call without one."""
        call = call if isinstance(call, Mapping) else {}
        function = call.get("function")
        function = function if isinstance(function, Mapping) else {}
        return cls(str(call.get("id") or at), str(function.get("name") or ""), function.get("arguments"))

    @property
    def parsed_arguments(self) -> dict[str, Any]:
        """Arguments by name; empty if they are no JSON object."""
        arguments = self.arguments
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = {}
        return arguments if isinstance(arguments, dict) else {}


def conversations_of(steps: Sequence[Step], losses: Losses) -> Iterator[StepConversation]:
    """Yields a trajectory's conversations in order; each step is in one. Counts reworded answers."""
    start = 0
    for position in range(1, len(steps) + 1):
        if position == len(steps) or not _continues(steps[position], steps[position - 1]):
            found = _conversation(steps[start:position], start)
            losses.add("step.messages (answers that came back in a client's words)", found.reworded)
            yield found
            start = position


def _continues(step: Step, before: Step) -> bool:
    known = len(before.messages)
    return (
        step.segment == before.segment
        and step.continues(before)
        and len(step.messages) > known
        and identical(step.tools, before.tools)
        and identical(step.messages[:known], before.messages[:])
        and step.messages[known]["role"] == before.response.get("role")
        and same_message(step.messages[known], before.response)  # type: ignore[arg-type]
    )


def _conversation(steps: Sequence[Step], start: int) -> StepConversation:
    messages: list[Message] = []
    sampled, reworded = [], 0
    for step in steps:
        if messages:
            reworded += not identical(step.messages[len(messages) - 1], messages[-1])
        messages.extend(step.messages[len(messages) :])
        sampled.append(len(messages))
        messages.append(step.response)  # type: ignore[arg-type]
    return StepConversation(messages, sampled, steps, range(start, start + len(steps)), reworded)


def with_weights(conversation: StepConversation) -> list[JsonMessage]:
    """Returns the messages as JSON data; assistant messages that the policy did not sample here have weight 0."""
    sampled = set(conversation.sampled)
    return [
        {**message, "weight": 0} if message["role"] == "assistant" and position not in sampled else message
        for position, message in enumerate(conversation.json_messages())
    ]


def steps_from(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], sampled: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Returns the fields of the steps of a conversation, one per sampled answer, without tokens.

    Args:
        messages: All messages.
        tools: Tools on offer.
        sampled: Positions of the sampled answers. None for all assistant messages whose ``weight`` is not 0.
    """
    bare = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    if sampled is None:
        sampled = [
            position
            for position, message in enumerate(messages)
            if message.get("role") == "assistant" and message.get("weight", 1)
        ]
    return [
        {
            "messages": bare[:position],
            "response": bare[position],
            "tools": list(tools),
            "prompt_ids": [],
            "completion_ids": [],
        }
        for position in sampled
    ]
