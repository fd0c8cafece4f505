"""Conversations of clients, which share what an earlier call has sent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rllm_gateway.messages import EMPTY, chained


class History:
    """A conversation as its client sees it, with a hash after each message.

    Histories are immutable. One that goes on from another holds only what it adds, so that turn 200 costs what turn 5
    costs.

    Args:
        messages: Normalized messages, see `rllm_gateway.messages.normalized`.
        before: The conversation that they go on from.
    """

    __slots__ = ("_before", "_hashes", "_length", "_messages")

    def __init__(self, messages: Sequence[Mapping[str, Any]], before: History | None = None) -> None:
        self._before = before
        self._messages = messages
        digest = EMPTY if before is None else before.digest
        self._hashes = list(itertools.accumulate(messages, chained, initial=digest))
        self._length = len(messages) + (0 if before is None else len(before))

    def __len__(self) -> int:
        return self._length

    @property
    def digest(self) -> bytes:
        """Hash of the whole conversation."""
        return self._hashes[-1]

    def extended(self, messages: Sequence[Mapping[str, Any]]) -> History:
        """Returns this conversation with more messages at its end."""
        return History(messages, self)

    def backwards(self) -> Iterator[tuple[int, Mapping[str, Any], bytes]]:
        """Yields, from the last message to the first: the number up to and with it, the message, and the hash."""
        at: History | None = self
        while at is not None:
            end = at._length
            for index in range(len(at._messages) - 1, -1, -1):
                yield end, at._messages[index], at._hashes[index + 1]
                end -= 1
            at = at._before

    def since(self, start: int) -> list[Mapping[str, Any]]:
        """Returns the messages from number ``start`` on."""
        count = self._length - start
        return [message for _, message, _ in itertools.islice(self.backwards(), count)][::-1]
