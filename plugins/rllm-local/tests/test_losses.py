"""Policy losses against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from rllm_core.algorithms.torch_losses import LossInputs, PPOClip, Reinforce
from rllm_core.errors import ConfigError


def inputs(current: torch.Tensor, old: torch.Tensor | None, advantages: torch.Tensor) -> LossInputs:
    """One sequence."""
    return LossInputs(current, old, advantages, torch.zeros(len(current), dtype=torch.int64), 1)


ROLLOUT = torch.tensor([-1.1, -0.4, -1.2, -0.1], dtype=torch.float64)
CURRENT = torch.tensor([-1.0, -0.45, -0.9, -0.15], dtype=torch.float64)
ONES = torch.ones(4, dtype=torch.float64)


def ppo(**options: float) -> PPOClip:
    return PPOClip(options, where="algorithm.loss_options")


@pytest.mark.parametrize(
    ("advantage", "options", "expected"),
    [
        (1.0, {}, -1.051907),  # the third ratio, 1.34986, is clipped at 1.2
        (1.0, {"clip_high": 0.28}, -1.071907),
        (-1.0, {}, 1.089372),  # a pessimistic bound: a ratio above the clip counts in full against the policy
    ],
)
def test_ppo_clip_means(advantage: float, options: dict[str, float], expected: float) -> None:
    losses = ppo(**options)(inputs(CURRENT, ROLLOUT, advantage * ONES))
    assert losses.mean().item() == pytest.approx(expected, abs=1e-6)


def test_ppo_clip_gradient_stops_at_the_bounds() -> None:
    current = CURRENT.clone().requires_grad_()
    ppo()(inputs(current, ROLLOUT, ONES)).sum().backward()
    ratio = torch.exp(CURRENT - ROLLOUT)
    assert torch.allclose(current.grad, torch.where(ratio > 1.2, 0.0, -ratio))


def test_ppo_clip_stays_finite_for_abandoned_tokens() -> None:
    losses = ppo()(inputs(torch.tensor([0.0]), torch.tensor([-500.0]), torch.tensor([-1.0])))
    assert torch.isfinite(losses).all()


def test_reinforce_is_the_policy_gradient() -> None:
    advantages = torch.tensor([1.0, -2.0, 0.0, 0.5], dtype=torch.float64)
    current = CURRENT.clone().requires_grad_()
    losses = Reinforce()(inputs(current, None, advantages))
    losses.sum().backward()
    assert torch.equal(losses.detach(), -advantages)
    assert torch.equal(current.grad, -advantages)


def test_on_policy_the_losses_have_one_gradient() -> None:
    gradients = []
    for loss in (Reinforce(), ppo()):
        current = ROLLOUT.clone().requires_grad_()
        loss(inputs(current, ROLLOUT, 3 * ONES)).sum().backward()
        gradients.append(current.grad)
    assert torch.equal(*gradients)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.loss_options.clip_low = 1.5"):
        ppo(clip_low=1.5)
    with pytest.raises(ValueError, match="the loss needs them"):
        ppo()(inputs(CURRENT, None, ONES))


def test_a_loss_takes_no_options_unless_it_says_so() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm.loss_options.clip_low'"):
        Reinforce({"clip_low": 0.1}, where="algorithm.loss_options")
    with pytest.raises(ConfigError, match=r"did you mean 'algorithm.loss_options.clip_high'"):
        ppo(clip_hihg=0.1)
