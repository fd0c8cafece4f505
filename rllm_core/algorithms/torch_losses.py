"""Policy losses in torch, for backends that train with it. The core itself never imports this module.

A loss sees every sampled token of a micro-batch at once, in tensors of shape ``(tokens,)``, and returns what each of
them contributes, to be *minimised*. It does no averaging: the backend aggregates with the counts of the whole
optimizer step (`rllm_core.algorithms.aggregation`). ``logprobs`` carries the gradient; the others are constants.

``r`` is the ratio ``pi_theta / pi_old`` of a token, its log clamped to +-20, so that a token that the policy has
abandoned gives a large number and not an infinite one; ``A`` is its advantage, a correction's weight included.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from pydantic import Field

from rllm_core.algorithms.corrections import MAX_LOG_RATIO
from rllm_core.algorithms.options import Configured
from rllm_core.blame import blamed
from rllm_core.config import Section
from rllm_core.errors import RunError


@dataclass(frozen=True)
class LossInputs:
    """The sampled tokens of some sequences, one sequence after another.

    Attributes:
        logprobs: ``(tokens,)`` of the policy that is trained, with gradient.
        old_logprobs: ``(tokens,)`` of the policy ratios begin at (``algorithm.proximal_policy``), or None if unknown.
        advantages: ``(tokens,)``.
        sequence_of_token: ``(tokens,)`` int64, which sequence each token is of, from 0.
        sequences: How many there are; each has at least one token.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    sequence_of_token: torch.Tensor
    sequences: int

    def log_ratios(self) -> torch.Tensor:
        """``(tokens,)`` ``log r``, with gradient.

        Raises:
            ValueError: If the old log-probabilities are unknown.
        """
        return (self.logprobs - self.known_old_logprobs()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def known_old_logprobs(self) -> torch.Tensor:
        """``(tokens,)`` `old_logprobs`.

        Raises:
            ValueError: If they are unknown.
        """
        if self.old_logprobs is None:
            raise ValueError("the log-probabilities of the policy that sampled are unknown, and the loss needs them")
        return self.old_logprobs

    def sequence_means(self, values: torch.Tensor) -> torch.Tensor:
        """``(sequences,)`` the mean of ``values`` over the tokens of each sequence."""
        zeros = values.new_zeros(self.sequences)
        sums = zeros.index_add(0, self.sequence_of_token, values)
        return sums / zeros.index_add(0, self.sequence_of_token, torch.ones_like(values))


class PolicyLoss(Configured, ABC):
    """Per-token losses, selected by ``algorithm.loss``.

    Attributes:
        needs_old_logprobs: Whether samples must carry the log-probabilities of the policy before.
    """

    needs_old_logprobs: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """Losses of shape ``(tokens,)``."""

    def clipped(self, inputs: LossInputs) -> torch.Tensor | None:
        """``(tokens,)`` bool: which tokens count less, or not at all, because their ratio went too far; for metrics.

        None if there is no such bound.
        """
        return None


def losses_of(loss: PolicyLoss, inputs: LossInputs) -> torch.Tensor:
    """``(tokens,)`` what a loss says, checked, since a wrong shape would be broadcast without a word.

    Raises:
        RunError: If it fails, or does not say one finite loss per token though the policy is sound.
    """
    try:
        losses = loss(inputs)
    except Exception as error:  # it may be anybody's
        raise RunError(f"{loss.label} failed: {blamed(error)}") from error
    if not isinstance(losses, torch.Tensor) or losses.shape != inputs.logprobs.shape:
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, torch.Tensor) else f"a {type(losses).__name__}"
        raise RunError(f"{loss.label} must return one loss per token, {tuple(inputs.logprobs.shape)}, not {found}")
    if not torch.isfinite(losses.detach()).all() and torch.isfinite(inputs.logprobs.detach()).all():
        raise RunError(f"{loss.label} returned losses that are not finite")
    return losses


def clipped_of(loss: PolicyLoss, inputs: LossInputs) -> torch.Tensor | None:
    """``(tokens,)`` bool `PolicyLoss.clipped`, checked likewise.

    Raises:
        RunError: If it fails, or does not say yes or no per token.
    """
    try:
        clipped = loss.clipped(inputs)
    except Exception as error:  # it may be anybody's
        raise RunError(f"{loss.label} failed: {blamed(error)}") from error
    if clipped is None:
        return None
    if not isinstance(clipped, torch.Tensor) or clipped.dtype != torch.bool or clipped.shape != inputs.logprobs.shape:
        raise RunError(f"{loss.label} must say of each token whether it is clipped, as a tensor of bools")
    return clipped


class Reinforce(PolicyLoss):
    """``-exp(logp - stop_gradient(logp)) * A``: the policy gradient of Williams (1992), exact on policy.

    Its value is ``-A``, its gradient ``-A * grad logp``. Off policy it is biased unless a correction weighs ``A``.
    """

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        return -torch.exp(inputs.logprobs - inputs.logprobs.detach()) * inputs.advantages


class PPOClipOptions(Section):
    """``algorithm.loss_options`` of ``ppo_clip``."""

    clip_low: float = Field(default=0.2, ge=0, lt=1, description="Ratios below 1 - clip_low get no gradient.")
    clip_high: float = Field(default=0.2, ge=0, description="Ratios above 1 + clip_high get no gradient.")


class PPOClip(PolicyLoss):
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``.

    Source: PPO, arXiv 1707.06347, eq. 7; separate bounds (clip-higher) as in DAPO, arXiv 2503.14476. With
    ``proximal_policy = "forward"`` and the correction ``importance`` it is decoupled PPO (arXiv 2110.00641).
    """

    needs_old_logprobs = True
    options_model = PPOClipOptions
    options: PPOClipOptions

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        return -_clipped_objective(inputs.log_ratios().exp(), inputs.advantages, self.options)

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        return _beyond_clip(inputs.log_ratios().exp(), inputs.advantages, self.options)


class DualClipOptions(PPOClipOptions):
    """``algorithm.loss_options`` of ``dual_clip``."""

    dual_clip: float = Field(default=3.0, gt=1, description="With A < 0, ratios above it get no gradient either.")


class DualClip(PolicyLoss):
    """That of ``ppo_clip``, but with ``A < 0`` at most ``-dual_clip A``, so that no ratio makes it arbitrarily large.

    Source: arXiv 1912.09729: with ``A < 0`` the objective is ``max(min(r A, clip(r) A), dual_clip A)``.
    """

    needs_old_logprobs = True
    options_model = DualClipOptions
    options: DualClipOptions

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        advantages = inputs.advantages
        objective = _clipped_objective(inputs.log_ratios().exp(), advantages, self.options)
        bounded = torch.maximum(objective, self.options.dual_clip * advantages)
        return -torch.where(advantages < 0, bounded, objective)

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        ratio = inputs.log_ratios().exp()
        too_bad = (ratio > self.options.dual_clip) & (inputs.advantages < 0)
        return too_bad | _beyond_clip(ratio, inputs.advantages, self.options)


class GSPOOptions(Section):
    """``algorithm.loss_options`` of ``gspo``."""

    clip_low: float = Field(default=3e-4, ge=0, lt=1, description="Sequence ratios below 1 - clip_low: no gradient.")
    clip_high: float = Field(default=4e-4, ge=0, description="Sequence ratios above 1 + clip_high: no gradient.")


class GSPO(PolicyLoss):
    """``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)`` with the geometric mean ``s`` of a sequence's ratios.

    As a token's loss, ``s`` is ``stop_gradient(s) * pi_theta / stop_gradient(pi_theta)``: where all advantages of a
    sequence are equal, the mean over its tokens has the gradient of the sequence's loss. Aggregate with
    ``sequence_mean_token_mean`` as the paper does. Source: arXiv 2507.18071, in its token form (GSPO-token).
    """

    needs_old_logprobs = True
    options_model = GSPOOptions
    options: GSPOOptions

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        on_policy = torch.exp(inputs.logprobs - inputs.logprobs.detach())
        return -_clipped_objective(self._ratios(inputs) * on_policy, inputs.advantages, self.options)

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        return _beyond_clip(self._ratios(inputs), inputs.advantages, self.options)

    @staticmethod
    def _ratios(inputs: LossInputs) -> torch.Tensor:
        """``(tokens,)`` ``s`` of each token's sequence, a constant."""
        return inputs.sequence_means(inputs.log_ratios().detach()).exp()[inputs.sequence_of_token]


class CISPOOptions(Section):
    """``algorithm.loss_options`` of ``cispo``."""

    clip_low: float = Field(default=1.0, ge=0, le=1, description="Weights are at least 1 - clip_low; 1 is no bound.")
    clip_high: float = Field(default=4.0, ge=0, description="Weights are at most 1 + clip_high.")


class CISPO(PolicyLoss):
    """``-stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) * A * logp``: every token keeps a gradient.

    Source: MiniMax-M1, arXiv 2506.13585, without a lower bound; the cap of 5 is that of ScaleRL, arXiv 2510.13786.
    """

    needs_old_logprobs = True
    options_model = CISPOOptions
    options: CISPOOptions

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        ratio = inputs.log_ratios().detach().exp()
        weights = ratio.clamp(1 - self.options.clip_low, 1 + self.options.clip_high)
        return -weights * inputs.advantages * inputs.logprobs

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        ratio = inputs.log_ratios().exp()
        return (ratio > 1 + self.options.clip_high) | (ratio < 1 - self.options.clip_low)


class ImportanceSampling(PolicyLoss):
    """``-r A``: unbiased from any policy that could have sampled the token, and of unbounded variance."""

    needs_old_logprobs = True

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        return -inputs.log_ratios().exp() * inputs.advantages


class DPPOTVOptions(Section):
    """``algorithm.loss_options`` of ``dppo_tv``."""

    limit_low: float = Field(
        default=0.2, ge=0, le=1, description="With A <= 0, a fall of probability by more: no loss."
    )
    limit_high: float = Field(
        default=0.2, ge=0, le=1, description="With A > 0, a rise of probability by more: no loss."
    )


class DPPOTV(PolicyLoss):
    """``-r A`` where the token's probability did not yet move too far in the direction of ``A``, else 0.

    Too far is ``pi_theta - pi_old > limit_high`` with ``A > 0``, and ``< -limit_low`` otherwise: a bound on the total
    variation instead of the ratio, which lets improbable tokens move. Source: arXiv 2602.04879.
    """

    needs_old_logprobs = True
    options_model = DPPOTVOptions
    options: DPPOTVOptions

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        losses = -inputs.log_ratios().exp() * inputs.advantages
        return losses.masked_fill(self.clipped(inputs), 0.0)

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        old = inputs.known_old_logprobs()
        moved = inputs.logprobs.detach().exp() - old.exp()
        return torch.where(inputs.advantages > 0, moved > self.options.limit_high, moved < -self.options.limit_low)


class CrossEntropy(PolicyLoss):
    """``-logp * A``: with advantages of 1, the negative log-likelihood of supervised training."""

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        return -inputs.logprobs * inputs.advantages


def kl_estimate(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """``(tokens,)`` estimates of ``KL(policy || reference)`` with gradient, from tokens of the policy.

    With ``x = log(reference / policy)``, clamped to +-20: k1 is ``-x`` (unbiased, and as a loss its gradient is zero on
    average), k2 ``x^2 / 2`` (as a loss, the gradient of the divergence), k3 ``e^x - x - 1`` (unbiased and never
    negative). Source: Schulman, "Approximating KL Divergence" (2020).

    Args:
        logprobs: ``(tokens,)`` of the policy.
        reference_logprobs: ``(tokens,)`` of the reference model.
        estimator: ``k1``, ``k2`` or ``k3``.
    """
    x = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -x
    return x.square() / 2 if estimator == "k2" else x.expm1() - x


class _Bounds(Protocol):
    """How far ratios may go."""

    @property
    def clip_low(self) -> float: ...

    @property
    def clip_high(self) -> float: ...


def _clipped_objective(ratio: torch.Tensor, advantages: torch.Tensor, bounds: _Bounds) -> torch.Tensor:
    """``(tokens,)`` the pessimistic one of the advantages times ratios and clipped ratios."""
    clipped = ratio.clamp(1 - bounds.clip_low, 1 + bounds.clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def _beyond_clip(ratio: torch.Tensor, advantages: torch.Tensor, bounds: _Bounds) -> torch.Tensor:
    """``(tokens,)`` bool: where the clipped ratio is the pessimistic one."""
    too_high = (ratio > 1 + bounds.clip_high) & (advantages > 0)
    return too_high | ((ratio < 1 - bounds.clip_low) & (advantages < 0))
