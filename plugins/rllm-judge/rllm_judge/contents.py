"""The distinct transcripts of a group: equal rollouts are judged once, and equal groups get the same scores."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rllm_core.algorithms.group_scorer import RolloutGroup
from rllm_core.seeds import derive_seed
from rllm_judge.transcripts import shortened, tools_of, transcripts_of


@dataclass(frozen=True)
class Contents:
    """The transcripts that a judge can distinguish in a group.

    Attributes:
        tools: Tools that the prompts offered, as JSON.
        common: Messages that all rollouts start with, as JSON.
        texts: The distinct transcripts, sorted, so that their numbers do not depend on the order of the rollouts.
        numbers: Number of each rollout's transcript, by rollout id.
        seed: Seed that depends only on the contents and the run's seed. It fixes the order in which the judge sees them
            within a run, so an equal group of the same run finds its replies in the cache.
    """

    tools: str
    common: str
    texts: Sequence[str]
    numbers: Mapping[str, int]
    seed: int

    @classmethod
    def of(cls, group: RolloutGroup, max_characters: int) -> Contents:
        """Returns the distinct contents of a group's rollouts; see `rllm_judge.transcripts`."""
        told = transcripts_of(group.episodes, max_characters)
        texts = sorted(set(told.rollouts.values()))
        tools = shortened(tools_of(group.episodes), max_characters)
        digest = hashlib.sha256("\0".join([tools, told.common, *texts]).encode()).hexdigest()
        numbers = {rollout: texts.index(text) for rollout, text in told.rollouts.items()}
        seed = derive_seed(group.run_seed, "judge", digest)
        return cls(tools, told.common, texts, numbers, seed)

    def seed_of(self, numbers: Sequence[int]) -> int:
        """Returns the seed of a question about some of the contents, in this order."""
        return derive_seed(self.seed, *map(int, numbers))
