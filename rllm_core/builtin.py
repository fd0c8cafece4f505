"""What the core itself provides, through the same hooks as everybody else."""

from __future__ import annotations

from rllm_core.hookspecs import hookimpl
from rllm_core.providers import AdvantageEstimator, PolicyLoss

_ADVANTAGES = "rllm_core.algorithms.advantages"
_LOSSES = "rllm_core.algorithms.torch_losses"


@hookimpl
def advantage_estimators() -> list[AdvantageEstimator]:
    """The estimators in `rllm_core.algorithms.advantages`."""
    return [
        AdvantageEstimator(
            name="grpo", load=f"{_ADVANTAGES}.outcome:GRPO", summary="Group mean and standard deviation."
        ),
        AdvantageEstimator(name="rloo", load=f"{_ADVANTAGES}.outcome:RLOO", summary="Leave-one-out mean of the group."),
        AdvantageEstimator(
            name="return_to_go", load=f"{_ADVANTAGES}.turns:ReturnToGo", summary="Per-turn returns with a baseline."
        ),
    ]


@hookimpl
def policy_losses() -> list[PolicyLoss]:
    """The losses in `rllm_core.algorithms.torch_losses`, which only backends that train with torch import."""
    return [
        PolicyLoss(name="reinforce", load=f"{_LOSSES}:Reinforce", summary="The policy gradient, exact on policy."),
        PolicyLoss(name="ppo_clip", load=f"{_LOSSES}:PPOClip", summary="Clipped ratio to the policy before."),
        PolicyLoss(name="dual_clip", load=f"{_LOSSES}:DualClip", summary="PPO, bounded for bad tokens as well."),
        PolicyLoss(name="gspo", load=f"{_LOSSES}:GSPO", summary="Clipped ratio of whole sequences."),
        PolicyLoss(name="cispo", load=f"{_LOSSES}:CISPO", summary="Clipped weight; every token keeps a gradient."),
        PolicyLoss(name="importance_sampling", load=f"{_LOSSES}:ImportanceSampling", summary="Unclipped ratio."),
        PolicyLoss(name="dppo_tv", load=f"{_LOSSES}:DPPOTV", summary="Ratio; masked where probabilities moved far."),
        PolicyLoss(name="cross_entropy", load=f"{_LOSSES}:CrossEntropy", summary="Negative log-likelihood."),
    ]
