"""Routing IDs of conversations."""

from __future__ import annotations

import numpy as np
import pytest
from rllm_verl import routing
from rllm_verl.routing import BLOCK_TOKENS, ConversationRoutes

from rllm_core.types import TokenIds, token_ids


def some(seed: int, count: int = 3 * BLOCK_TOKENS) -> TokenIds:
    return token_ids(np.random.default_rng(seed).integers(0, 1000, count))


def turn(
    conversations: ConversationRoutes, prompt: TokenIds, completion: TokenIds, version: int = 0
) -> tuple[str, TokenIds]:
    """Samples a turn; returns its routing ID and the tokens so far."""
    routing_id = conversations.routing_id(prompt, version)
    conversations.remember(routing_id, prompt, completion)
    return routing_id, token_ids(np.concatenate([prompt, completion]))


def test_the_turns_of_a_rollout_share_an_id_and_the_rollouts_of_a_group_do_not() -> None:
    conversations, task = ConversationRoutes(), some(0)
    ids: list[list[str]] = []
    for rollout in range(4):
        written, mine = task, []
        for number in range(3):
            routing_id, written = turn(conversations, written, some(100 * rollout + number, 20))
            mine.append(routing_id)
            written = token_ids(np.concatenate([written, some(number, 7)]))  # the environment's answer
        ids.append(mine)
    assert all(len(set(mine)) == 1 for mine in ids)
    assert len({mine[0] for mine in ids}) == 4


def test_rollouts_that_started_together_each_find_their_own() -> None:
    conversations, task = ConversationRoutes(), some(0)
    firsts = [conversations.routing_id(task, 0) for _ in range(3)]
    for number, routing_id in enumerate(firsts):
        conversations.remember(routing_id, task, some(number + 1))
    for number, routing_id in enumerate(firsts):
        continued = token_ids(np.concatenate([task, some(number + 1), some(9)]))
        assert conversations.routing_id(continued, 0) == routing_id


def test_another_history_is_another_conversation() -> None:
    conversations = ConversationRoutes()
    first, written = turn(conversations, some(0), some(1))
    edited = written.copy()
    edited[0] += 1
    assert conversations.routing_id(edited, 0) != first
    assert conversations.routing_id(written[:-BLOCK_TOKENS], 0) != first  # ends before it
    assert conversations.routing_id(written, 0) == first


def test_a_weight_sync_forgets_because_it_empties_the_caches() -> None:
    conversations = ConversationRoutes()
    first, written = turn(conversations, some(0), some(1), version=3)
    assert conversations.routing_id(written, 3) == first
    assert conversations.routing_id(written, 4) != first
    assert conversations.routing_id(written, 3) != first


def test_memory_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MOST_CONVERSATIONS", 5)
    conversations = ConversationRoutes()
    turns = [turn(conversations, some(seed), some(seed + 100)) for seed in range(8)]
    kept = [conversations.routing_id(written, 0) == routing_id for routing_id, written in turns]
    assert kept == [False] * 3 + [True] * 5


def test_less_than_a_block_has_nothing_to_find() -> None:
    conversations = ConversationRoutes()
    short = some(0, BLOCK_TOKENS // 2 - 1)
    first, written = turn(conversations, short, short)
    assert conversations.routing_id(written, 0) != first
