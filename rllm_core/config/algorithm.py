"""Keys of the algorithm."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rllm_core.run_file import Section
from rllm_core.schedules import linear


class RoleConfig(Section, use_attribute_docstrings=True):
    """``[algorithm.roles.ROLE]``: the advantage estimator of one role."""

    name: str
    """Name of the role's advantage estimator."""
    estimator_options: dict[str, Any] = Field(default_factory=dict)
    """Options of that estimator."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Factor applied to the role's advantages; less than 1 makes the role learn more slowly."""


class KLConfig(Section, use_attribute_docstrings=True):
    """``[algorithm.kl]``: a penalty for moving away from the reference model, which is the initial model."""

    coefficient: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the KL penalty. 0 disables it."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token KL estimator. With x = log(reference / policy): k1 = -x, k2 = x^2/2, k3 = e^x - x - 1."""
    place: Literal["loss", "reward"] = "loss"
    """Add the penalty to the loss, or subtract it from token rewards before advantages."""


class OverlongConfig(Section, use_attribute_docstrings=True):
    """``[algorithm.overlong]``: a reward penalty that rises over the last tokens of the response budget."""

    penalty_tokens: Annotated[int, Field(ge=0)] = 0
    """Number of tokens before max_tokens over which the penalty rises linearly. 0 disables it."""
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    """Response length at which the full penalty applies. Defaults to rollout.max_response_tokens."""
    penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Full penalty, subtracted from the reward."""


class AlgorithmConfig(Section, use_attribute_docstrings=True):
    """``[algorithm]``: advantages, corrections and loss."""

    name: str = "grpo"
    """Name of the advantage estimator."""
    estimator_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the advantage estimator."""
    roles: dict[str, RoleConfig] = Field(default_factory=dict)
    """Estimators of single roles that do not use the one above."""
    loss: str = "reinforce"
    """Name of the policy loss; the backend must support it."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the policy loss."""
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
    ] = "token_mean"
    """Aggregation of token losses: the mean over all tokens of the step, or the mean over sequences of each one's mean,
    its sum, or its sum divided by a constant.
    """
    aggregation_norm_tokens: Annotated[int | None, Field(ge=1)] = None
    """Divisor of sequence_mean_token_sum_norm. Defaults to rollout.max_response_tokens."""
    proximal_policy: Literal["rollout", "forward", "interpolated"] = "rollout"
    """Denominator of the loss's ratio: the policy that sampled (`rollout`; the ratio itself then corrects for
    staleness), the weights before the step (`forward`, one more forward pass), or an interpolation between the policy
    that sampled and the one in training (`interpolated`).
    """
    corrections: tuple[str, ...] = ()
    """Names of the corrections for the difference between sampling and proximal policy."""
    correction_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of the corrections: one table per correction, by name."""
    group_scorer: str = ""
    """Name of the group scorer, which gives the rollouts of a group their rewards. Empty for the workflow's own."""
    group_scorer_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the group scorer."""
    group_scorer_timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    """Time limit for scoring one group, for each attempt."""
    group_scorer_attempts: Annotated[int, Field(ge=1)] = 3
    """Maximum attempts at scoring a group. After the last one, its rollouts are unscored, and are not trained."""
    filter_uniform_groups: bool = False
    """Filter groups whose rewards are all equal. Groups without rewards are kept."""
    refill_filtered_groups: bool = True
    """Replace each group filtered for its rewards or termination reasons. If false, the step trains fewer groups."""
    max_group_attempts: Annotated[int, Field(ge=1)] = 10
    """Maximum groups started for one step, in multiples of max_groups_in_flight."""
    filter_termination_reasons: tuple[
        Literal["max_turns_exceeded", "max_prompt_tokens_exceeded", "max_response_tokens_exceeded", "done"], ...
    ] = ()
    """Exclude rollouts with these termination reasons from training and from their group's baseline."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus at the first step."""
    entropy_coefficient_final: Annotated[float | None, Field(ge=0)] = None
    """Weight at the last step, with a linear change. Defaults to entropy_coefficient."""
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
