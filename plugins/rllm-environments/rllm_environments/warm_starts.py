"""Warm starts for models made from scratch: random legal actions, for anything with ``reset`` and ``step``.

They teach a model what an answer looks like, and nothing of what is good: every legal action is equally likely, or,
with habits, equally likely to be the habit of an observation.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

Conversation = list[dict[str, Any]]


class Playable(Protocol):
    """A game for one player, with text on both sides."""

    def reset(self, seed: int) -> str:
        """Starts a new game, and returns what the player sees."""
        ...

    def legal_actions(self, rng: random.Random) -> Sequence[str]:
        """Returns the legal actions now, or a sample of them if there are endless ones."""
        ...

    def step(self, action: str) -> str | None:
        """Takes an action, and returns what the player sees next, or None at the end."""
        ...


def random_legal_actions(
    game: Playable, rng: random.Random, *, seeds: Iterator[int], max_turns: int, opening: str = "", habit: float = 0.0
) -> Iterator[Conversation]:
    """Endless conversations of a player that draws from the legal actions; the assistant messages are the targets.

    Args:
        game: Game to play; only one conversation is made at a time.
        rng: Source of all random choices; equal states give equal conversations.
        seeds: Seeds of the games, endless. They must not be those of held-out tasks.
        max_turns: Maximum actions per game.
        opening: Text before the first observation.
        habit: Share of the actions that depend on what the player sees: each observation's last line has one legal
            action, drawn by chance, that is taken again whenever it is seen. A model that has only seen actions that
            depend on nothing has learned to look at nothing, and needs long to unlearn it.
    """
    salt = rng.getrandbits(32) if habit else 0
    for seed in seeds:
        said: Conversation = []
        seen: str | None = game.reset(seed)
        while seen is not None and len(said) < 2 * max_turns:
            actions = game.legal_actions(rng)
            if not actions:
                break
            is_habit = habit > 0 and rng.random() < habit
            action = _habit_of(seen, actions, salt) if is_habit else rng.choice(actions)
            text = seen if said else opening + seen
            said += [{"role": "user", "content": text}, {"role": "assistant", "content": action}]
            seen = game.step(action)
        if said:
            yield said


def _habit_of(seen: str, actions: Sequence[str], salt: int) -> str:
    """Returns the action that chance has given to an observation's last line."""
    last_line = seen.rpartition("\n")[2]
    return actions[zlib.crc32(f"{salt}:{last_line}".encode()) % len(actions)]
