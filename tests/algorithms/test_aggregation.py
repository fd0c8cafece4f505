"""Tests that every aggregation mode weighs the tokens of a step as its formula says."""

from __future__ import annotations

from fractions import Fraction

import pytest

from rllm_core.algorithms.aggregation import Aggregation
from rllm_core.backend import OptimizerStep

LENGTHS = [1, 4, 5]


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("token_mean", [Fraction(1, 10)] * 3),
        ("sequence_mean_token_mean", [Fraction(1, 3 * length) for length in LENGTHS]),
        ("sequence_mean_token_sum", [Fraction(1, 3)] * 3),
        ("sequence_mean_token_sum_norm", [Fraction(1, 3 * 8)] * 3),
    ],
)
def test_the_share_of_a_token_in_the_loss_of_a_step(name: str, shares: list[Fraction]) -> None:
    aggregation = Aggregation(name, norm_tokens=8)
    step = OptimizerStep(step=1, total_steps=1, samples=3, sampled_tokens=sum(LENGTHS), trajectories=3)
    found = [aggregation.token_weight(length) / aggregation.denominator(step) for length in LENGTHS]
    assert found == pytest.approx([float(share) for share in shares], rel=1e-12)
