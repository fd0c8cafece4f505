"""Warm starts for models trained from scratch: random legal actions, for anything with ``reset`` and ``step``.

They teach a model the form of an answer, but not which answers are good: every legal action is equally likely, or, with
habits, equally likely to become the habit of an observation.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

Conversation = list[dict[str, Any]]


class Playable(Protocol):
    """A single-player game with text observations and actions."""

    def reset(self, seed: int) -> str:
        """Starts a new game, and returns the first observation."""
        ...

    def legal_actions(self, rng: random.Random) -> Sequence[str]:
        """Returns the currently legal actions, or a sample of them if there are infinitely many."""
        ...

    def step(self, action: str) -> str | None:
        """Takes an action, and returns the next observation, or None at the end."""
        ...


def random_legal_actions(
    game: Playable, rng: random.Random, *, seeds: Iterator[int], max_turns: int, opening: str = "", habit: float = 0.0
) -> Iterator[Conversation]:
    """Yields endless conversations of a player with random legal actions; the assistant messages are the targets.

    Args:
        game: Game to play; plays only one conversation at a time.
        rng: Source of all random choices; equal states give equal conversations.
        seeds: Seeds of the games, endless. They must not be those of held-out tasks.
        max_turns: Maximum number of actions per game.
        opening: Text before the first observation.
        habit: Share of the actions that depend on the observation: the last line of each observation has one legal
            action, drawn at random, that is repeated whenever the line appears. A model that has only seen actions that
            depend on nothing has learned to ignore observations, and needs long to unlearn it.
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
    """Returns the action that is randomly assigned to an observation's last line."""
    last_line = seen.rpartition("\n")[2]
    return actions[zlib.crc32(f"{salt}:{last_line}".encode()) % len(actions)]
