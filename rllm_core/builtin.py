"""What the core itself provides, through the same hooks as everybody else."""

from __future__ import annotations

from rllm_core.hookspecs import hookimpl
from rllm_core.providers import AdvantageEstimator, Correction, PolicyLoss, Sandbox, Workflow

_ADVANTAGES = "rllm_core.algorithms.advantages"
_LOSSES = "rllm_core.algorithms.torch_losses"
_CORRECTIONS = "rllm_core.algorithms.corrections"


@hookimpl
def advantage_estimators() -> list[AdvantageEstimator]:
    """The estimators in `rllm_core.algorithms.advantages`."""
    return [
        AdvantageEstimator(
            name="grpo", load=f"{_ADVANTAGES}.outcome:GRPO", summary="Group mean and standard deviation."
        ),
        AdvantageEstimator(
            name="dr_grpo", load=f"{_ADVANTAGES}.outcome:DrGRPO", summary="Group mean, not divided by anything."
        ),
        AdvantageEstimator(name="rloo", load=f"{_ADVANTAGES}.outcome:RLOO", summary="Leave-one-out mean of the group."),
        AdvantageEstimator(
            name="reinforce", load=f"{_ADVANTAGES}.outcome:Reinforce", summary="The reward itself, less a constant."
        ),
        AdvantageEstimator(
            name="reinforce_plus_plus",
            load=f"{_ADVANTAGES}.batch:ReinforcePlusPlus",
            summary="Returns per token, whitened over the step.",
        ),
        AdvantageEstimator(
            name="reinforce_plus_plus_baseline",
            load=f"{_ADVANTAGES}.batch:ReinforcePlusPlusBaseline",
            summary="Group mean, whitened over the step.",
        ),
        AdvantageEstimator(
            name="prpo",
            load=f"{_ADVANTAGES}.batch:PRPO",
            summary="Mean and standard deviation of the step's trajectories.",
        ),
        AdvantageEstimator(
            name="return_to_go", load=f"{_ADVANTAGES}.turns:ReturnToGo", summary="Per-turn returns with a baseline."
        ),
        AdvantageEstimator(
            name="sft", load=f"{_ADVANTAGES}.imitation:SFT", summary="1 for every token that somebody wrote."
        ),
        AdvantageEstimator(
            name="distill",
            load=f"{_ADVANTAGES}.imitation:Distill",
            summary="Log-probabilities of a teacher less those of the policy.",
        ),
        AdvantageEstimator(
            name="precomputed",
            load=f"{_ADVANTAGES}.precomputed:Precomputed",
            summary="What the workflow computed, per token.",
        ),
    ]


@hookimpl
def workflows() -> list[Workflow]:
    """``sft``, which learns a data set."""
    return [
        Workflow(
            name="sft",
            load="rllm_core.supervised.workflow:SFTWorkflow",
            config="rllm_core.supervised.workflow:SFTConfig",
            run_file="rllm_core.supervised.workflow:run_file",
            summary="Supervised fine-tuning on a file of conversations.",
        )
    ]


@hookimpl
def sandboxes() -> list[Sandbox]:
    """``child``, which bounds what a program may use and isolates nothing."""
    return [
        Sandbox(
            name="child",
            load="rllm_core.sandbox:ChildSandbox",
            summary="A process with limits on time, memory and output; not a sandbox against hostile code.",
        )
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
        PolicyLoss(
            name="cross_entropy",
            load=f"{_LOSSES}:CrossEntropy",
            summary="Negative log-likelihood.",
            learns_written=True,
        ),
    ]


@hookimpl
def corrections() -> list[Correction]:
    """The corrections in `rllm_core.algorithms.corrections`."""
    return [
        Correction(name="token_tis", load=f"{_CORRECTIONS}:TokenTIS", summary="Token ratios, capped."),
        Correction(name="sequence_tis", load=f"{_CORRECTIONS}:SequenceTIS", summary="Sequence ratios, capped."),
        Correction(name="icepop", load=f"{_CORRECTIONS}:IcePop", summary="Token ratios, 0 outside bounds (MIS)."),
        Correction(name="sequence_mis", load=f"{_CORRECTIONS}:SequenceMIS", summary="Sequence ratios, 0 outside."),
        Correction(name="importance", load=f"{_CORRECTIONS}:Importance", summary="Token ratios as they are."),
        Correction(
            name="geometric_rejection",
            load=f"{_CORRECTIONS}:GeometricRejection",
            summary="Masks sequences by the geometric mean of their ratios.",
        ),
        Correction(
            name="k3_rejection",
            load=f"{_CORRECTIONS}:K3Rejection",
            summary="Masks sequences by their estimated divergence.",
        ),
    ]
