"""Providers that the core ships, registered through the same hooks as the providers of any plugin.

Only this table names the classes. No submodule may be called like a hook: importing it would replace the hook's
implementation.
"""

from __future__ import annotations

from rllm_core.hookspecs import hookimpl
from rllm_core.providers import (
    AdvantageEstimatorProvider,
    CorrectionProvider,
    PolicyLossProvider,
    RolloutHostProvider,
    SandboxProvider,
    TaskSamplerProvider,
)

ESTIMATORS = {
    "grpo": ("outcome:GRPO", "Reward minus group mean, over the group's std."),
    "dr_grpo": ("outcome:DrGRPO", "Reward minus group mean, without scaling."),
    "rloo": ("outcome:RLOO", "Reward minus leave-one-out mean."),
    "reinforce": ("outcome:Reinforce", "Reward minus a constant."),
    "reinforce_plus_plus": ("batch:ReinforcePlusPlus", "Per-token returns, whitened over the step."),
    "reinforce_plus_plus_baseline": (
        "batch:ReinforcePlusPlusBaseline",
        "Reward minus group mean, whitened over the step.",
    ),
    "prpo": ("batch:PRPO", "Reward minus the step's mean, over the step's std."),
    "return_to_go": ("turns:ReturnToGo", "Per-turn returns with a baseline."),
    "sft": ("without_rewards:SFT", "1 for every target token."),
    "distill": ("without_rewards:Distill", "Teacher log-probabilities minus policy log-probabilities."),
    "precomputed": ("without_rewards:Precomputed", "Per-token advantages from the workflow."),
}
LOSSES = {
    "reinforce": ("ReinforceLoss", "Policy gradient, exact on policy."),
    "ppo_clip": ("PPOClip", "Ratio to the proximal policy, clipped."),
    "dual_clip": ("DualClip", "PPO, also bounded for A < 0."),
    "gspo": ("GSPO", "Sequence ratio, clipped."),
    "cispo": ("CISPO", "Clipped weight; every token keeps a gradient."),
    "importance_sampling": ("ImportanceSampling", "Unclipped ratio."),
    "dppo_tv": ("DPPOTV", "Ratio, masked if probability moved too far."),
    "cross_entropy": ("CrossEntropy", "Negative log-likelihood."),
}
CORRECTIONS = {
    "token_tis": ("TokenTIS", "Token ratios, capped."),
    "sequence_tis": ("SequenceTIS", "Sequence ratios, capped."),
    "icepop": ("IcePop", "Token ratios, 0 outside bounds (MIS)."),
    "sequence_mis": ("SequenceMIS", "Sequence ratios, 0 outside bounds."),
    "importance": ("Importance", "Token ratios, without bounds."),
    "geometric_rejection": ("GeometricRejection", "Masks sequences by the geometric mean of their ratios."),
    "k3_rejection": ("K3Rejection", "Masks sequences by their estimated divergence."),
}
FOR_TARGET_TOKENS = {"cross_entropy"}


@hookimpl
def advantage_estimators() -> list[AdvantageEstimatorProvider]:
    """The estimators in `rllm_core.builtin.estimators`."""
    return [
        AdvantageEstimatorProvider(name=name, load=f"{__name__}.estimators.{path}", summary=summary)
        for name, (path, summary) in ESTIMATORS.items()
    ]


@hookimpl
def policy_losses() -> list[PolicyLossProvider]:
    """The losses in `rllm_core.builtin.losses`, imported only by backends that train with torch."""
    return [
        PolicyLossProvider(
            name=name,
            load=f"{__name__}.losses:{loss}",
            summary=summary,
            learns_written=name in FOR_TARGET_TOKENS,
        )
        for name, (loss, summary) in LOSSES.items()
    ]


@hookimpl
def corrections() -> list[CorrectionProvider]:
    """The corrections in `rllm_core.builtin.off_policy_corrections`."""
    return [
        CorrectionProvider(name=name, load=f"{__name__}.off_policy_corrections:{correction}", summary=summary)
        for name, (correction, summary) in CORRECTIONS.items()
    ]


@hookimpl
def task_samplers() -> list[TaskSamplerProvider]:
    """``uniform``."""
    return [
        TaskSamplerProvider(
            name="uniform", load=f"{__name__}.uniform:Uniform", summary="Every task once per epoch, in random order."
        )
    ]


@hookimpl
def sandboxes() -> list[SandboxProvider]:
    """``child``, which limits a program's resources but does not isolate it."""
    return [
        SandboxProvider(
            name="child",
            load=f"{__name__}.sandbox:ChildSandbox",
            summary="A process with limits on time, memory and output; no isolation from hostile code.",
        )
    ]


@hookimpl
def rollout_hosts() -> list[RolloutHostProvider]:
    """``inline`` and ``processes``."""
    return [
        RolloutHostProvider(
            name="inline",
            load="rllm_core.hosts.inline:Inline",
            summary="The process of the run.",
        ),
        RolloutHostProvider(
            name="processes",
            load=f"{__name__}.process_host:Processes",
            summary="Other processes of this machine.",
        ),
    ]
