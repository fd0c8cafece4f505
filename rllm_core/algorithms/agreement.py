"""Agreement of the sampler's log-probabilities with the trainer's, which shows whether both have the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rllm_core.types import Floats

# Share of the tokens that the comparison leaves out: those that differ most. With a mixture of experts, rounding
# sometimes selects another expert, which moves single tokens by a nat or more.
LEFT_OUT = 1 / 8


@dataclass(frozen=True)
class LogprobDifference:
    """Difference between two sets of log-probabilities of the same tokens, in nats.

    Attributes:
        typical: Mean of the absolute differences, without the largest ones (`LEFT_OUT`).
        largest: Largest absolute difference.
        tokens: Number of tokens compared.
    """

    typical: float
    largest: float
    tokens: int

    @classmethod
    def between(cls, ours: Sequence[Floats], theirs: Sequence[Floats]) -> LogprobDifference:
        """Compares arrays ``(sampled_tokens,)``, one per completion."""
        return cls.of(np.abs(np.concatenate(ours) - np.concatenate(theirs)))

    @classmethod
    def of(cls, gaps: Floats) -> LogprobDifference:
        """Summarizes absolute differences ``(tokens,)``, at least one."""
        gaps = np.sort(gaps)  # NaN comes last
        kept = gaps[: len(gaps) - int(LEFT_OUT * len(gaps))]
        typical = float("nan") if np.isnan(gaps).any() else float(kept.mean())
        return cls(typical, float(gaps[-1]), len(gaps))
