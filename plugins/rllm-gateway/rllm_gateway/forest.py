"""The answers of one rollout, and the search for the answer that a call continues from."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm_core.types import MessageView
from rllm_gateway.calls import AnswerNode
from rllm_gateway.history import History


class Forest:
    """The answers of a rollout, as trees. Every answer is immutable; a conversation is a path from a root.

    A call continues from the longest prefix of its messages that ends with an answer of this rollout. A call without
    such a prefix starts a new root: a sub-agent, a title, a compacted or edited history. It is never realigned with an
    existing conversation, because tokens must be trained in the context in which they were sampled.

    Attributes:
        roots: Answers without a predecessor, in call order.
        rewritten: How many times a client sent an answer back in other words with the same meaning.
    """

    def __init__(self) -> None:
        self.roots: list[AnswerNode] = []
        self.rewritten = 0
        self._by_said: dict[bytes, list[AnswerNode]] = defaultdict(list)
        self._by_id: dict[str, AnswerNode] = {}
        self._numbers: dict[bytes, set[int]] = defaultdict(set)

    def __getitem__(self, answer_id: str) -> AnswerNode:
        return self._by_id[answer_id]

    def add(self, answer: AnswerNode) -> None:
        """Adds an answer."""
        self._by_said[answer.history.digest].append(answer)
        self._by_id[answer.id] = answer
        (self.roots if answer.before is None else answer.before.after).append(answer)

    def place(self, history: History, model: str, *, named: AnswerNode | None = None) -> ForestPlace:
        """Finds the answer that a conversation continues from.

        Args:
            history: The whole conversation.
            model: Name of the model that the client asks for, to choose between equal answers.
            named: Answer that the client names, to choose between equal ones.
        """
        for length, message, digest in history.backwards():
            if message["role"] == "assistant" and (candidates := self._by_said.get(digest)):
                answer = named if named in candidates else _chosen(candidates, message, model)
                self.rewritten += is_rewritten(answer, message)
                return ForestPlace(answer, history.since(length), message)
        return ForestPlace(None, history.since(0))

    def reserve(self, said: bytes) -> int:
        """Returns the lowest number that no equal call holds, whether answered or still running.

        Equal calls thus get different samples, in whatever order they arrive, and a call that repeats an abandoned one
        gets the samples of that call.
        """
        taken = self._numbers[said]
        number = next(number for number in itertools.count() if number not in taken)
        taken.add(number)
        return number

    def release(self, said: bytes, number: int) -> None:
        """Releases the number of a call that got no answer."""
        self._numbers[said].discard(number)

    def paths(self) -> Iterator[AnswerNode]:
        """Yields the answers that a client received, conversation by conversation, with branches after their trunk."""
        waiting = self.roots[::-1]
        while waiting:
            answer = waiting.pop()
            if answer.is_delivered or answer.after:
                yield answer
            waiting.extend(reversed(answer.after))


def _chosen(candidates: Sequence[AnswerNode], shown: Mapping[str, Any], model: str) -> AnswerNode:
    """Chooses among equal answers by the call ids and reasoning that the client shows, by model, then by successors."""
    ids = [call["id"] for call in shown.get("tool_calls") or ()]
    reasoning = shown.get("reasoning_content")

    def differs(one: AnswerNode) -> tuple[bool, bool, bool, int]:
        return (
            bool(ids) and [call["id"] for call in one.calls] != ids,
            bool(reasoning) and one.reasoning != reasoning,
            one.model != model,
            len(one.after),
        )

    return min(candidates, key=differs)


def is_rewritten(answer: AnswerNode, shown: Mapping[str, Any]) -> bool:
    """Whether a client shows an answer differently from how it was sent; missing reasoning does not count."""
    sent = {"content": answer.text, "tool_calls": list(answer.calls), "reasoning_content": answer.reasoning}
    shown = {"reasoning_content": answer.reasoning} | dict(shown)
    return any((shown.get(key) or None) != (value or None) for key, value in sent.items())


@dataclass(frozen=True, slots=True)
class ForestPlace:
    """Where a call belongs in the forest.

    Attributes:
        before: The answer that the call continues from; None for a new root.
        added: The messages after that answer.
        shown: That answer, as the client repeats it.
    """

    before: AnswerNode | None
    added: Sequence[Mapping[str, Any]]
    shown: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, *, hide_system: bool = False) -> MessageView:
        """Returns the messages to sample from: those of ``before``, its own response, and the client's new ones.

        The client's copy of the policy's answer is never rendered. Tool results refer to the policy's own call ids,
        whatever ids the client uses, and come in the order of the calls, because many templates leave out the ids.

        Args:
            hide_system: Whether to leave out system messages that the client adds.
        """
        new = [message for message in self.added if not (hide_system and message["role"] == "system")]
        if self.before is None:
            return MessageView(new)
        renamed = _renamed(self.before, self.shown)
        added = [
            message | {"tool_call_id": renamed[message["tool_call_id"]]}  # type: ignore[operator]
            if message.get("tool_call_id") in renamed
            else message
            for message in new
        ]
        order = [call["id"] for call in self.before.calls]
        end = next((at for at, one in enumerate(added) if one.get("tool_call_id") not in order), len(added))
        results = sorted(added[:end], key=lambda one: order.index(one["tool_call_id"]))
        return self.before.step.messages.extended([self.before.step.response, *results, *added[end:]])


def _renamed(answer: AnswerNode, shown: Mapping[str, Any]) -> dict[str, str]:
    """Maps the call ids that the client shows to the policy's: to the same id, or else by position."""
    own = [call["id"] for call in answer.calls]
    theirs = [call["id"] for call in shown.get("tool_calls") or ()]
    return {their: their if their in own else mine for their, mine in zip(theirs, own, strict=False)}
