"""Routes requests to servers: the turns of a conversation stay on one server, so that each finds its prefix cache."""

from __future__ import annotations

import uuid
from collections import OrderedDict

import numpy as np

from rllm_core.types import TokenIds

# vLLM caches whole blocks of this size, so a shorter conversation has no cache to find.
BLOCK_TOKENS = 16
# verl's router remembers the same number.
MOST_CONVERSATIONS = 10_000


class ConversationRoutes:
    """Routing IDs of conversations, recognized by their tokens.

    A prompt that starts with an earlier prompt and its completion is the next turn of that conversation. Its tokens
    identify it wherever the request comes from: a rollout here or in another process, or a program behind a gateway.

    A weight sync empties the servers' caches, so conversations are forgotten then and spread over the servers again.
    """

    def __init__(self) -> None:
        self._ids: OrderedDict[int, str] = OrderedDict()  # keyed by the hash of all whole blocks
        self._version: int | None = None

    def routing_id(self, prompt_ids: TokenIds, version: int) -> str:
        """Returns the ID of the longest conversation that the prompt continues, else a new one.

        Args:
            prompt_ids: ``(tokens,)`` prompt.
            version: Live weight version.
        """
        if version != self._version:
            self._ids.clear()
            self._version = version
        for block in reversed(_chained(prompt_ids)):
            if block in self._ids:
                return self._ids[block]
        return uuid.uuid4().hex

    def remember(self, routing_id: str, prompt_ids: TokenIds, completion_ids: TokenIds) -> None:
        """Records where a turn was sampled.

        Args:
            routing_id: ID that its request had.
            prompt_ids: ``(tokens,)`` prompt.
            completion_ids: ``(tokens,)`` completion.
        """
        blocks = _chained(np.concatenate([prompt_ids, completion_ids]))
        if not blocks:
            return
        self._ids[blocks[-1]] = routing_id
        self._ids.move_to_end(blocks[-1])
        if len(self._ids) > MOST_CONVERSATIONS:
            self._ids.popitem(last=False)


def _chained(ids: TokenIds) -> list[int]:
    """Returns one hash per whole block, each covering all tokens up to the block's end."""
    plain = np.ascontiguousarray(ids, np.int64)
    hashes: list[int] = []
    chain = 0
    for start in range(0, len(plain) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        chain = hash((chain, plain[start : start + BLOCK_TOKENS].tobytes()))
        hashes.append(chain)
    return hashes
