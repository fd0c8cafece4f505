"""Client conversations, which share the messages that an earlier call has sent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rllm_gateway.messages import EMPTY, chained


class History:
    """A conversation as the client sees it, with a hash after each message.

    Histories are immutable. One that extends another holds only the added messages, so turn 200 costs as much as turn
    5.

    Args:
        messages: Normalized messages, see `rllm_gateway.messages.normalized`.
        before: The conversation that the messages extend.
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
        """Returns this conversation extended by more messages."""
        return History(messages, self)

    def backwards(self) -> Iterator[tuple[int, Mapping[str, Any], bytes]]:
        """Yields, from last message to first: number of messages up to and including it, the message, the hash."""
        at: History | None = self
        while at is not None:
            end = at._length
            for index in range(len(at._messages) - 1, -1, -1):
                yield end, at._messages[index], at._hashes[index + 1]
                end -= 1
            at = at._before

    def since(self, start: int) -> list[Mapping[str, Any]]:
        """Returns the messages from index ``start`` on."""
        count = self._length - start
        return [message for _, message, _ in itertools.islice(self.backwards(), count)][::-1]
