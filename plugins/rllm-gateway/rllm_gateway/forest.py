"""The answers of one rollout, and which of them a call goes on from."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm_core.types import MessageView
from rllm_gateway.calls import Answer
from rllm_gateway.history import History


class Forest:
    """Answers of a rollout. Every answer is immutable; a conversation is a path from a root.

    A call goes on from the longest prefix of its messages that ends with an answer of this rollout. Whatever has no
    such prefix is a new root: a sub-agent, a title, a compacted or edited history. It is never realigned, because
    tokens must be trained in the context in which they were sampled.

    Attributes:
        roots: Answers without a predecessor, in the order of the calls.
        rewritten: How often a client has sent an answer back in other words of the same meaning.
    """

    def __init__(self) -> None:
        self.roots: list[Answer] = []
        self.rewritten = 0
        self._by_said: dict[bytes, list[Answer]] = defaultdict(list)
        self._by_id: dict[str, Answer] = {}
        self._numbers: dict[bytes, set[int]] = defaultdict(set)

    def __getitem__(self, answer_id: str) -> Answer:
        return self._by_id[answer_id]

    def add(self, answer: Answer) -> None:
        """Adds an answer."""
        self._by_said[answer.history.digest].append(answer)
        self._by_id[answer.id] = answer
        (self.roots if answer.before is None else answer.before.after).append(answer)

    def place(self, history: History, *, named: Answer | None = None) -> Place:
        """Finds the answer that a conversation goes on from.

        Args:
            history: The whole conversation.
            named: Answer that the client names, which decides between equal ones.
        """
        for length, message, digest in history.backwards():
            if message["role"] == "assistant" and (candidates := self._by_said.get(digest)):
                answer = named if named in candidates else self._chosen(candidates, message)
                self.rewritten += is_rewritten(answer, message)
                return Place(answer, history.since(length), message)
        return Place(None, history.since(0))

    @staticmethod
    def _chosen(candidates: Sequence[Answer], shown: Mapping[str, Any]) -> Answer:
        """Of equal answers, the one whose ids of tool calls the client shows, else the one with fewest successors."""
        ids = [call["id"] for call in shown.get("tool_calls") or ()]
        return min(
            candidates, key=lambda one: (bool(ids) and [call["id"] for call in one.calls] != ids, len(one.after))
        )

    def reserve(self, said: bytes) -> int:
        """Returns the lowest number that no equal call has: neither an answered one nor one that is being asked.

        So equal calls have different samples, whatever order they come in, and a call that repeats one that was given
        up has its samples.
        """
        taken = self._numbers[said]
        number = next(number for number in itertools.count() if number not in taken)
        taken.add(number)
        return number

    def release(self, said: bytes, number: int) -> None:
        """Gives back the number of a call without an answer."""
        self._numbers[said].discard(number)

    def paths(self) -> Iterator[Answer]:
        """Yields the answers that a client got, conversation by conversation, and branches after their trunk."""
        waiting = self.roots[::-1]
        while waiting:
            answer = waiting.pop()
            if answer.is_delivered or answer.after:
                yield answer
            waiting.extend(reversed(answer.after))

    def roots_by_model(self) -> Counter[str]:
        """Number of roots of each model."""
        return Counter(root.model for root in self.roots)


def is_rewritten(answer: Answer, shown: Mapping[str, Any]) -> bool:
    """Whether a client shows an answer otherwise than it got it; reasoning may be missing."""
    sent = {"content": answer.text, "tool_calls": list(answer.calls), "reasoning_content": answer.reasoning}
    shown = {"reasoning_content": answer.reasoning} | dict(shown)
    return any((shown.get(key) or None) != (value or None) for key, value in sent.items())


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call belongs.

    Attributes:
        before: The answer that it goes on from; None for a root.
        added: The messages after that.
        shown: That answer as the client shows it.
    """

    before: Answer | None
    added: Sequence[Mapping[str, Any]]
    shown: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, *, hide_system: bool = False) -> MessageView:
        """Returns the messages to sample from: those of the answer, its own words, and what the client adds.

        The client's copy of what the policy said is never rendered. Results name the calls of the policy, whatever ids
        the client has given them.

        Args:
            hide_system: Whether to leave out what the client adds as the system.
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
        return self.before.step.messages.extended([self.before.step.response, *added])


def _renamed(answer: Answer, shown: Mapping[str, Any]) -> dict[str, str]:
    """Returns the policy's ids of the calls by the ids that the client shows: the same one, else by position."""
    own = [call["id"] for call in answer.calls]
    theirs = [call["id"] for call in shown.get("tool_calls") or ()]
    return {their: their if their in own else mine for their, mine in zip(theirs, own, strict=False)}
