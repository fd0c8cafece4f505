"""Tests of the policy loss: contract and formula."""

from __future__ import annotations

import math

import pytest
import torch
from rllm_core.algorithms.torch_losses import LossInputs
from rllm_devkit.contracts import PolicyLossContract

from rllm_placeholder.loss import PlaceholderLoss


class TestContract(PolicyLossContract):
    """Runs each contract check as a test, with the default options."""

    name = "placeholder"


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "is_clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.1, 1.0, -(1 + 0.2 * math.tanh(0.5)), False),
        (1.4, 1.0, -(1 + 0.2 * math.tanh(2.0)), True),
        (0.6, -1.0, 1 - 0.2 * math.tanh(2.0), True),
    ],
)
def test_the_formula(ratio: float, advantage: float, expected: float, is_clipped: bool) -> None:
    inputs = LossInputs(
        logprobs=torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64),
        old_logprobs=torch.tensor([-1.0], dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        sequence_of_token=torch.zeros(1, dtype=torch.int64),
        sequences=1,
    )
    loss = PlaceholderLoss()
    assert loss(inputs).tolist() == pytest.approx([expected])
    assert loss.clipped(inputs).tolist() == [is_clipped]
