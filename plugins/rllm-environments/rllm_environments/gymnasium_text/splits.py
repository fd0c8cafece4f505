"""Chooses the held-out games: those that start in a state that no training game starts in, where states are known."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import count
from typing import Literal

from rllm_core.errors import ConfigError
from rllm_core.workflow import Split
from rllm_environments.gymnasium_text.environment import TextEnvironment

HeldOut = Literal["starts", "seeds", "nothing"]

SAMPLED_SEEDS = 64
MIN_STARTS = 8
ONE_IN = 7
MAX_TRIES = 5000
FIRST_VALIDATION_SEED = 1_000_000


class Splits:
    """The games of both splits.

    Args:
        environment: Environment that provides the start states.

    Attributes:
        held_out: ``"starts"`` if no validation game starts in a state in which a training game starts. ``"seeds"`` if
            only the seeds differ, so games may start in the same state. ``"nothing"`` if every seed starts the same
            game.
    """

    def __init__(self, environment: TextEnvironment) -> None:
        self._environment = environment
        starts = {environment.start_of(seed) for seed in range(SAMPLED_SEEDS)}
        self.held_out: HeldOut = "nothing" if len(starts) == 1 else "seeds"
        self._salt = 0
        if environment.has_state_hash and len(starts) >= MIN_STARTS:
            self.held_out = "starts"
            # With few starts, chance alone could hold out none or most of them.
            least, most = max(1, len(starts) // 10), len(starts) // 4
            self._salt = next(salt for salt in count() if least <= sum(_drawn(salt, s) for s in starts) <= most)

    def seed(self, split: Split, number: int) -> int:
        """Returns the seed of a game of a split.

        Raises:
            ConfigError: If no further game of the split is found.
        """
        if self.held_out != "starts":
            return number + (FIRST_VALIDATION_SEED if split == "validation" else 0)
        for seed in range(number * MAX_TRIES, (number + 1) * MAX_TRIES):
            if _drawn(self._salt, self._environment.start_of(seed)) == (split == "validation"):
                return seed
        raise ConfigError(f"{self._environment.name}: no game for split {split!r} in {MAX_TRIES} seeds")

    def training_seeds(self, first: int) -> Iterator[int]:
        """Yields endless seeds of training games."""
        return (self.seed("train", number) for number in count(first))


def _drawn(salt: int, start: str) -> bool:
    digest = blake2b(f"{salt}:{start}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % ONE_IN == 0
