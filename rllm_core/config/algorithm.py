"""Keys of the algorithm."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rllm_core.run_file import Section
from rllm_core.schedules import linear


class RoleConfig(Section):
    """``[algorithm.roles.ROLE]``: the advantage estimator of one role."""

    name: Annotated[str, Field(description="Name of the role's advantage estimator.")]
    estimator_options: Annotated[dict[str, Any], Field(description="Options of that estimator.")] = Field(
        default_factory=dict
    )
    weight: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Factor applied to the role's advantages; less than 1 makes the role learn more slowly.",
        ),
    ] = 1.0


class KLConfig(Section):
    """``[algorithm.kl]``: a penalty for moving away from the reference model, which is the initial model."""

    coefficient: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="Weight of the KL penalty. 0 disables it.")
    ] = 0.0
    estimator: Annotated[
        Literal["k1", "k2", "k3"],
        Field(
            description="Per-token KL estimator. With x = log(reference / policy): k1 = -x, k2 = x^2/2, "
            "k3 = e^x - x - 1."
        ),
    ] = "k3"
    place: Annotated[
        Literal["loss", "reward"],
        Field(description="Add the penalty to the loss, or subtract it from token rewards before advantages."),
    ] = "loss"


class OverlongConfig(Section):
    """``[algorithm.overlong]``: a reward penalty that rises over the last tokens of the response budget."""

    penalty_tokens: Annotated[
        int,
        Field(
            ge=0,
            description="Number of tokens before max_tokens over which the penalty rises linearly. 0 disables it.",
        ),
    ] = 0
    max_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            description="Response length at which the full penalty applies. Defaults to rollout.max_response_tokens.",
        ),
    ] = None
    penalty: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="Full penalty, subtracted from the reward.")
    ] = 1.0


class AlgorithmConfig(Section):
    """``[algorithm]``: advantages, corrections and loss."""

    name: Annotated[str, Field(description="Name of the advantage estimator.")] = "grpo"
    estimator_options: Annotated[dict[str, Any], Field(description="Options of the advantage estimator.")] = Field(
        default_factory=dict
    )
    roles: Annotated[
        dict[str, RoleConfig], Field(description="Estimators of single roles that do not use the one above.")
    ] = Field(default_factory=dict)
    loss: Annotated[str, Field(description="Name of the policy loss; the backend must support it.")] = "reinforce"
    loss_options: Annotated[dict[str, Any], Field(description="Options of the policy loss.")] = Field(
        default_factory=dict
    )
    aggregation: Annotated[
        Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"],
        Field(
            description="Aggregation of token losses: the mean over all tokens of the step, or over sequences the mean "
            "of each one's mean, its sum, or its sum divided by a constant."
        ),
    ] = "token_mean"
    aggregation_norm_tokens: Annotated[
        int | None,
        Field(ge=1, description="Divisor of sequence_mean_token_sum_norm. Defaults to rollout.max_response_tokens."),
    ] = None
    proximal_policy: Annotated[
        Literal["rollout", "forward", "interpolated"],
        Field(
            description="Denominator of the loss's ratio: the policy that sampled (`rollout`; the ratio itself then "
            "corrects for staleness), the weights before the step (`forward`, one more forward pass), or an "
            "interpolation between the policy that sampled and the one in training (`interpolated`)."
        ),
    ] = "rollout"
    corrections: Annotated[
        tuple[str, ...],
        Field(description="Names of the corrections for the difference between sampling and proximal policy."),
    ] = ()
    correction_options: Annotated[
        dict[str, dict[str, Any]], Field(description="Options of the corrections: one table per correction, by name.")
    ] = Field(default_factory=dict)
    filter_uniform_groups: Annotated[
        bool, Field(description="Filter groups whose rewards are all equal. Groups without rewards are kept.")
    ] = False
    refill_filtered_groups: Annotated[
        bool,
        Field(
            description="Replace each group filtered for its rewards or termination reasons. If false, the step trains "
            "fewer groups."
        ),
    ] = True
    max_group_attempts: Annotated[
        int,
        Field(
            ge=1,
            description="Maximum groups started for one step, in multiples of max_groups_in_flight.",
        ),
    ] = 10
    filter_termination_reasons: Annotated[
        tuple[Literal["max_turns_exceeded", "max_prompt_tokens_exceeded", "max_response_tokens_exceeded", "done"], ...],
        Field(
            description="Exclude rollouts with these termination reasons from training and from their group's baseline."
        ),
    ] = ()
    entropy_coefficient: Annotated[float, Field(ge=0, description="Weight of the entropy bonus at the first step.")] = (
        0.0
    )
    entropy_coefficient_final: Annotated[
        float | None,
        Field(ge=0, description="Weight at the last step, with a linear change. Defaults to entropy_coefficient."),
    ] = None
    kl: KLConfig = Field(default_factory=KLConfig)
    overlong: OverlongConfig = Field(default_factory=OverlongConfig)

    def estimator_names(self) -> dict[str, str]:
        """Names of the estimators by their keys in the run file, the default one first."""
        of_roles = {f"algorithm.roles.{role}.name": chosen.name for role, chosen in self.roles.items()}
        return {"algorithm.name": self.name} | of_roles

    def entropy_coefficient_at(self, step: int, total_steps: int) -> float:
        """Weight of the entropy bonus in optimizer step ``step`` (from 1), linear from the first step to the last."""
        last = self.entropy_coefficient_final
        return linear(step, total_steps, self.entropy_coefficient, self.entropy_coefficient if last is None else last)
