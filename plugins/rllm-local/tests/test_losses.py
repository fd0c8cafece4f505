"""Policy losses against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from rllm_core.algorithms.torch_losses import PPOClip, Reinforce
from rllm_core.config import AlgorithmConfig
from rllm_core.errors import ConfigError

ROLLOUT = torch.tensor([-1.1, -0.4, -1.2, -0.1], dtype=torch.float64)
CURRENT = torch.tensor([-1.0, -0.45, -0.9, -0.15], dtype=torch.float64)
ONES = torch.ones(4, dtype=torch.float64)


def ppo(**options: float) -> PPOClip:
    return PPOClip(AlgorithmConfig(loss="ppo_clip", loss_options=options))


@pytest.mark.parametrize(
    ("advantage", "options", "expected"),
    [
        (1.0, {}, -1.051907),  # the third ratio, 1.34986, is clipped at 1.2
        (1.0, {"clip_high": 0.28}, -1.071907),
        (-1.0, {}, 1.089372),  # a pessimistic bound: a ratio above the clip counts in full against the policy
    ],
)
def test_ppo_clip_means(advantage: float, options: dict[str, float], expected: float) -> None:
    losses = ppo(**options)(CURRENT, ROLLOUT, advantage * ONES)
    assert losses.mean().item() == pytest.approx(expected, abs=1e-6)


def test_ppo_clip_gradient_stops_at_the_bounds() -> None:
    current = CURRENT.clone().requires_grad_()
    ppo()(current, ROLLOUT, ONES).sum().backward()
    ratio = torch.exp(CURRENT - ROLLOUT)
    assert torch.allclose(current.grad, torch.where(ratio > 1.2, 0.0, -ratio))


def test_ppo_clip_stays_finite_for_abandoned_tokens() -> None:
    losses = ppo()(torch.tensor([0.0]), torch.tensor([-500.0]), torch.tensor([-1.0]))
    assert torch.isfinite(losses).all()


def test_reinforce_is_the_policy_gradient() -> None:
    advantages = torch.tensor([1.0, -2.0, 0.0, 0.5], dtype=torch.float64)
    current = CURRENT.clone().requires_grad_()
    losses = Reinforce(AlgorithmConfig())(current, None, advantages)
    losses.sum().backward()
    assert torch.equal(losses.detach(), -advantages)
    assert torch.equal(current.grad, -advantages)


def test_on_policy_the_losses_have_one_gradient() -> None:
    gradients = []
    for loss in (Reinforce(AlgorithmConfig()), ppo()):
        current = ROLLOUT.clone().requires_grad_()
        loss(current, ROLLOUT, 3 * ONES).sum().backward()
        gradients.append(current.grad)
    assert torch.equal(*gradients)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.loss_options.clip_low = 1.5"):
        ppo(clip_low=1.5)
    with pytest.raises(ValueError, match="needs the log-probabilities"):
        ppo()(CURRENT, None, ONES)


def test_a_loss_takes_no_options_unless_it_says_so() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm.loss_options.clip_low'"):
        Reinforce(AlgorithmConfig(loss_options={"clip_low": 0.1}))
    with pytest.raises(ConfigError, match=r"did you mean 'algorithm.loss_options.clip_high'"):
        ppo(clip_hihg=0.1)


def test_ppo_clip_limits_the_step_from_the_policy_before_it_where_that_is_known() -> None:
    loss = PPOClip(AlgorithmConfig(loss="ppo_clip", proximal_logprobs=True))
    current = CURRENT.clone().requires_grad_()
    loss(current, ROLLOUT, ONES, proximal_logprobs=CURRENT).sum().backward()
    assert torch.equal(current.grad, -ONES), "nothing has moved yet, however old the samples are"
    losses = loss(CURRENT, None, ONES, proximal_logprobs=ROLLOUT)
    assert torch.equal(losses, ppo()(CURRENT, ROLLOUT, ONES))


def test_a_loss_that_makes_no_use_of_them_refuses_proximal_logprobs() -> None:
    with pytest.raises(ConfigError, match="loss 'reinforce' makes no use of them"):
        Reinforce(AlgorithmConfig(proximal_logprobs=True))
