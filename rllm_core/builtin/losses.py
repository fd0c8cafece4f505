"""Policy losses that the core ships. ``r`` and ``A`` are defined in `rllm_core.algorithms.torch_losses`."""

from __future__ import annotations

from typing import Protocol

import torch
from pydantic import Field

from rllm_core.algorithms.torch_losses import LossInputs, PolicyLoss
from rllm_core.run_file import Section


class ReinforceLoss(PolicyLoss):
    """``-exp(logp - stop_gradient(logp)) * A``: the policy gradient of Williams (1992), exact on policy.

    Its value is ``-A`` and its gradient ``-A * grad logp``. Off policy it is biased unless a correction weights ``A``.
    """

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        return -torch.exp(inputs.logprobs - inputs.logprobs.detach()) * inputs.advantages


class PPOClipOptions(Section):
    """``algorithm.loss_options`` of ``ppo_clip``."""

    clip_low: float = Field(
        default=0.2, ge=0, lt=1, description="Lower clip range: ratios below 1 - clip_low get no gradient."
    )
    clip_high: float = Field(
        default=0.2, ge=0, description="Upper clip range: ratios above 1 + clip_high get no gradient."
    )


class PPOClip(PolicyLoss):
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``.

    Source: PPO, arXiv 1707.06347, eq. 7; separate bounds (clip-higher) as in DAPO, arXiv 2503.14476. With
    ``proximal_policy = "forward"`` and the correction ``importance``, it is decoupled PPO (arXiv 2110.00641).
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

    dual_clip: float = Field(
        default=3.0, gt=1, description="Ratio above which tokens with A < 0 get no gradient either."
    )


class DualClip(PolicyLoss):
    """Loss of ``ppo_clip``, but limited to ``-dual_clip A`` if ``A < 0``, so no ratio makes it arbitrarily large.

    Source: arXiv 1912.09729. With ``A < 0`` the objective is ``max(min(r A, clip(r) A), dual_clip A)``.
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

    clip_low: float = Field(
        default=3e-4, ge=0, lt=1, description="Lower clip range: sequence ratios below 1 - clip_low get no gradient."
    )
    clip_high: float = Field(
        default=4e-4, ge=0, description="Upper clip range: sequence ratios above 1 + clip_high get no gradient."
    )


class GSPO(PolicyLoss):
    """``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)`` with the geometric mean ``s`` of a sequence's ratios.

    In a token's loss, ``s`` is ``stop_gradient(s) * pi_theta / stop_gradient(pi_theta)``. If all advantages of a
    sequence are equal, the mean over its tokens has the gradient of the sequence's loss. Aggregate with
    ``sequence_mean_token_mean``, as the paper does. Source: arXiv 2507.18071, in its token form (GSPO-token).
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
        """``(tokens,)`` ``s`` of each token's sequence, as a constant."""
        return inputs.sequence_means(inputs.log_ratios().detach()).exp()[inputs.sequence_of_token]


class CISPOOptions(Section):
    """``algorithm.loss_options`` of ``cispo``."""

    clip_low: float = Field(
        default=1.0, ge=0, le=1, description="Lower clip range: weights are at least 1 - clip_low. 1 disables it."
    )
    clip_high: float = Field(default=4.0, ge=0, description="Upper clip range: weights are at most 1 + clip_high.")


class CISPO(PolicyLoss):
    """``-stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) * A * logp``: every token keeps a gradient.

    Source: MiniMax-M1, arXiv 2506.13585, without a lower bound; the cap of 5 is from ScaleRL, arXiv 2510.13786.
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
    """``-r A``: unbiased for any policy that could have sampled the token, with unbounded variance."""

    needs_old_logprobs = True

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        return -inputs.log_ratios().exp() * inputs.advantages


class DPPOTVOptions(Section):
    """``algorithm.loss_options`` of ``dppo_tv``."""

    limit_low: float = Field(
        default=0.2, ge=0, le=1, description="Drop in probability above which a token with A <= 0 gets no loss."
    )
    limit_high: float = Field(
        default=0.2, ge=0, le=1, description="Rise in probability above which a token with A > 0 gets no loss."
    )


class DPPOTV(PolicyLoss):
    """``-r A``, or 0 if the token's probability has already moved too far in the direction of ``A``.

    Too far means ``pi_theta - pi_old > limit_high`` if ``A > 0``, and ``< -limit_low`` otherwise. This bounds the total
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
    """``-logp * A``; with advantages of 1, the negative log-likelihood of supervised training."""

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        return -inputs.logprobs * inputs.advantages


class _Bounds(Protocol):
    """Clip range of ratios."""

    @property
    def clip_low(self) -> float: ...

    @property
    def clip_high(self) -> float: ...


def _clipped_objective(ratio: torch.Tensor, advantages: torch.Tensor, bounds: _Bounds) -> torch.Tensor:
    """``(tokens,)`` minimum of ratio and clipped ratio, each times the advantage."""
    clipped = ratio.clamp(1 - bounds.clip_low, 1 + bounds.clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def _beyond_clip(ratio: torch.Tensor, advantages: torch.Tensor, bounds: _Bounds) -> torch.Tensor:
    """``(tokens,)`` bool: tokens whose minimum is the clipped ratio."""
    too_high = (ratio > 1 + bounds.clip_high) & (advantages > 0)
    return too_high | ((ratio < 1 - bounds.clip_low) & (advantages < 0))
