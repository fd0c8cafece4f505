"""Aggregation of token losses into the loss of an optimizer step.

A step's loss is ``sum over tokens of weight * loss / denominator``. A token's weight depends only on its sequence; the
denominator depends on counts of the whole step, over all passes and ranks. A backend may therefore add up weighted
losses as groups arrive and divide once at the end: splitting a step into passes only changes rounding. A sequence is a
training sample, an unbroken segment of a trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass

from rllm_core.backend import OptimizerStep

AGGREGATIONS = frozenset(
    {"token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"}
)


@dataclass(frozen=True)
class Aggregation:
    """Aggregation mode of token losses (``algorithm.aggregation``).

    * ``token_mean``: mean over all tokens of the step (DAPO, arXiv 2503.14476, eq. 8).
    * ``sequence_mean_token_mean``: mean over sequences of their token means (GRPO, arXiv 2402.03300, eq. 3).
    * ``sequence_mean_token_sum``: mean over sequences of their token sums (the policy gradient of a trajectory).
    * ``sequence_mean_token_sum_norm``: the previous one, divided by a constant (Dr. GRPO, arXiv 2503.20783).

    Attributes:
        name: One of these names.
        norm_tokens: Constant for ``sequence_mean_token_sum_norm``.
    """

    name: str
    norm_tokens: int = 1

    def token_weight(self, sequence_tokens: int) -> float:
        """Weight of each sampled token of a sequence with ``sequence_tokens`` sampled tokens."""
        if self.name == "sequence_mean_token_mean":
            return 1 / sequence_tokens
        return 1 / self.norm_tokens if self.name == "sequence_mean_token_sum_norm" else 1.0

    def denominator(self, step: OptimizerStep) -> int:
        """Divisor of the weighted sum of a whole step, at least 1."""
        return max(1, step.sampled_tokens if self.name == "token_mean" else step.samples)
