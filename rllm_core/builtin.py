"""The core's own providers, registered through the same hooks as those of any plugin."""

from __future__ import annotations

from rllm_core.hookspecs import hookimpl
from rllm_core.providers import (
    AdvantageEstimatorProvider,
    CorrectionProvider,
    PolicyLossProvider,
    SandboxProvider,
    WorkflowProvider,
)

_ADVANTAGES = "rllm_core.algorithms.advantages"
_LOSSES = "rllm_core.algorithms.torch_losses"
_CORRECTIONS = "rllm_core.algorithms.corrections"


@hookimpl
def advantage_estimators() -> list[AdvantageEstimatorProvider]:
    """The estimators in `rllm_core.algorithms.advantages`."""
    return [
        AdvantageEstimatorProvider(
            name="grpo", load=f"{_ADVANTAGES}.outcome:GRPO", summary="Reward minus group mean, over the group's std."
        ),
        AdvantageEstimatorProvider(
            name="dr_grpo", load=f"{_ADVANTAGES}.outcome:DrGRPO", summary="Reward minus group mean, without scaling."
        ),
        AdvantageEstimatorProvider(
            name="rloo", load=f"{_ADVANTAGES}.outcome:RLOO", summary="Reward minus leave-one-out mean."
        ),
        AdvantageEstimatorProvider(
            name="reinforce", load=f"{_ADVANTAGES}.outcome:Reinforce", summary="Reward minus a constant."
        ),
        AdvantageEstimatorProvider(
            name="reinforce_plus_plus",
            load=f"{_ADVANTAGES}.batch:ReinforcePlusPlus",
            summary="Per-token returns, whitened over the step.",
        ),
        AdvantageEstimatorProvider(
            name="reinforce_plus_plus_baseline",
            load=f"{_ADVANTAGES}.batch:ReinforcePlusPlusBaseline",
            summary="Reward minus group mean, whitened over the step.",
        ),
        AdvantageEstimatorProvider(
            name="prpo",
            load=f"{_ADVANTAGES}.batch:PRPO",
            summary="Reward minus the step's mean, over the step's std.",
        ),
        AdvantageEstimatorProvider(
            name="return_to_go", load=f"{_ADVANTAGES}.turns:ReturnToGo", summary="Per-turn returns with a baseline."
        ),
        AdvantageEstimatorProvider(
            name="sft", load=f"{_ADVANTAGES}.imitation:SFT", summary="1 for every target token."
        ),
        AdvantageEstimatorProvider(
            name="distill",
            load=f"{_ADVANTAGES}.imitation:Distill",
            summary="Teacher log-probabilities minus policy log-probabilities.",
        ),
        AdvantageEstimatorProvider(
            name="precomputed",
            load=f"{_ADVANTAGES}.precomputed:Precomputed",
            summary="Per-token advantages from the workflow.",
        ),
    ]


@hookimpl
def workflows() -> list[WorkflowProvider]:
    """``sft``, supervised fine-tuning on a dataset."""
    return [
        WorkflowProvider(
            name="sft",
            load="rllm_core.supervised.workflow:SFTWorkflow",
            config="rllm_core.supervised.workflow:SFTConfig",
            run_file="rllm_core.supervised.workflow:run_file",
            summary="Supervised fine-tuning on a file of conversations.",
        )
    ]


@hookimpl
def sandboxes() -> list[SandboxProvider]:
    """``child``, which limits a program's resources but does not isolate it."""
    return [
        SandboxProvider(
            name="child",
            load="rllm_core.sandbox:ChildSandbox",
            summary="A process with limits on time, memory and output; no isolation from hostile code.",
        )
    ]


@hookimpl
def policy_losses() -> list[PolicyLossProvider]:
    """The losses in `rllm_core.algorithms.torch_losses`, imported only by backends that train with torch."""
    return [
        PolicyLossProvider(name="reinforce", load=f"{_LOSSES}:Reinforce", summary="Policy gradient, exact on policy."),
        PolicyLossProvider(
            name="ppo_clip", load=f"{_LOSSES}:PPOClip", summary="Ratio to the proximal policy, clipped."
        ),
        PolicyLossProvider(name="dual_clip", load=f"{_LOSSES}:DualClip", summary="PPO, also bounded for A < 0."),
        PolicyLossProvider(name="gspo", load=f"{_LOSSES}:GSPO", summary="Sequence ratio, clipped."),
        PolicyLossProvider(
            name="cispo", load=f"{_LOSSES}:CISPO", summary="Clipped weight; every token keeps a gradient."
        ),
        PolicyLossProvider(
            name="importance_sampling", load=f"{_LOSSES}:ImportanceSampling", summary="Unclipped ratio."
        ),
        PolicyLossProvider(
            name="dppo_tv", load=f"{_LOSSES}:DPPOTV", summary="Ratio, masked if probability moved too far."
        ),
        PolicyLossProvider(
            name="cross_entropy",
            load=f"{_LOSSES}:CrossEntropy",
            summary="Negative log-likelihood.",
            learns_written=True,
        ),
    ]


@hookimpl
def corrections() -> list[CorrectionProvider]:
    """The corrections in `rllm_core.algorithms.corrections`."""
    return [
        CorrectionProvider(name="token_tis", load=f"{_CORRECTIONS}:TokenTIS", summary="Token ratios, capped."),
        CorrectionProvider(name="sequence_tis", load=f"{_CORRECTIONS}:SequenceTIS", summary="Sequence ratios, capped."),
        CorrectionProvider(
            name="icepop", load=f"{_CORRECTIONS}:IcePop", summary="Token ratios, 0 outside bounds (MIS)."
        ),
        CorrectionProvider(
            name="sequence_mis", load=f"{_CORRECTIONS}:SequenceMIS", summary="Sequence ratios, 0 outside bounds."
        ),
        CorrectionProvider(
            name="importance", load=f"{_CORRECTIONS}:Importance", summary="Token ratios, without bounds."
        ),
        CorrectionProvider(
            name="geometric_rejection",
            load=f"{_CORRECTIONS}:GeometricRejection",
            summary="Masks sequences by the geometric mean of their ratios.",
        ),
        CorrectionProvider(
            name="k3_rejection",
            load=f"{_CORRECTIONS}:K3Rejection",
            summary="Masks sequences by their estimated divergence.",
        ),
    ]
