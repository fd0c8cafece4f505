"""The different contents of a group's rollouts: equal rollouts are judged once, and equal groups alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rllm_core.algorithms.group_scorer import RolloutGroup
from rllm_core.seeds import derive_seed
from rllm_judge.transcripts import shortened, tools_of, transcripts_of


@dataclass(frozen=True)
class Contents:
    """What a judge can tell apart in a group.

    Attributes:
        tools: Tools that were offered, as JSON.
        common: Messages with which all rollouts begin, as JSON.
        texts: The different transcripts, sorted, so that their numbers do not depend on the order of the rollouts.
        numbers: Number of each rollout's transcript, by rollout id.
        seed: Seed that depends on the contents and the run's seed only: the order in which a judge sees them is drawn
            for the run, and an equal group of the run finds its replies in the cache.
    """

    tools: str
    common: str
    texts: Sequence[str]
    numbers: Mapping[str, int]
    seed: int

    @classmethod
    def of(cls, group: RolloutGroup, max_characters: int) -> Contents:
        """Returns the contents of a group's rollouts; see `rllm_judge.transcripts`."""
        told = transcripts_of(group.episodes, max_characters)
        texts = sorted(set(told.rollouts.values()))
        tools = shortened(tools_of(group.episodes), max_characters)
        digest = hashlib.sha256("\0".join([tools, told.common, *texts]).encode()).hexdigest()
        numbers = {rollout: texts.index(text) for rollout, text in told.rollouts.items()}
        seed = derive_seed(group.run_seed, "judge", digest)
        return cls(tools, told.common, texts, numbers, seed)

    def seed_of(self, numbers: Sequence[int]) -> int:
        """Returns the seed of the question about some of them, in this order."""
        return derive_seed(self.seed, *map(int, numbers))
