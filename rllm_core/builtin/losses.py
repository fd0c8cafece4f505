"""Policy losses that the core ships. `rllm_core.algorithms.torch_losses` defines ``r`` and ``A``."""

from __future__ import annotations

import torch
from pydantic import Field

from rllm_core.algorithms.torch_losses import LossInputs, PolicyLoss
from rllm_core.run_file import Section


class ReinforceLoss(PolicyLoss):
    """``-exp(logp - stop_gradient(logp)) * A``: the policy gradient of Williams (1992), exact on policy.

    Its value is ``-A`` and its gradient ``-A * grad logp``. Off policy it is biased unless a correction weights ``A``.
    """

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        return -_one(inputs) * inputs.advantages


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
        ratios, advantages = self.ratios(inputs), inputs.advantages
        clipped = ratios.clamp(1 - self.options.clip_low, 1 + self.options.clip_high)
        return -torch.minimum(ratios * advantages, clipped * advantages)

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        ratios, advantages = self.ratios(inputs), inputs.advantages
        too_high = (ratios > 1 + self.options.clip_high) & (advantages > 0)
        return too_high | ((ratios < 1 - self.options.clip_low) & (advantages < 0))

    def ratios(self, inputs: LossInputs) -> torch.Tensor:
        """``(tokens,)`` ratios that are clipped, with gradient."""
        return inputs.log_ratios().exp()


class DualClipOptions(PPOClipOptions):
    """``algorithm.loss_options`` of ``dual_clip``."""

    dual_clip: float = Field(
        default=3.0, gt=1, description="Ratio above which tokens with A < 0 get no gradient either."
    )


class DualClip(PPOClip):
    """Loss of ``ppo_clip``, but limited to ``-dual_clip A`` if ``A < 0``, so no ratio makes it arbitrarily large.

    Source: arXiv 1912.09729. With ``A < 0`` the objective is ``max(min(r A, clip(r) A), dual_clip A)``.
    """

    options_model = DualClipOptions
    options: DualClipOptions

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        losses, advantages = super().__call__(inputs), inputs.advantages
        return torch.where(advantages < 0, torch.minimum(losses, -self.options.dual_clip * advantages), losses)

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        too_bad = (self.ratios(inputs) > self.options.dual_clip) & (inputs.advantages < 0)
        return too_bad | super().clipped(inputs)


class GSPOOptions(PPOClipOptions):
    """``algorithm.loss_options`` of ``gspo``."""

    clip_low: float = Field(
        default=3e-4, ge=0, lt=1, description="Lower clip range: sequence ratios below 1 - clip_low get no gradient."
    )
    clip_high: float = Field(
        default=4e-4, ge=0, description="Upper clip range: sequence ratios above 1 + clip_high get no gradient."
    )


class GSPO(PPOClip):
    """``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)`` with the geometric mean ``s`` of a sequence's ratios.

    In a token's loss, ``s`` is ``stop_gradient(s) * pi_theta / stop_gradient(pi_theta)``. If all advantages of a
    sequence are equal, the mean over its tokens has the gradient of the sequence's loss. Aggregate with
    ``sequence_mean_token_mean``, as the paper does. Source: arXiv 2507.18071, in its token form (GSPO-token).
    """

    options_model = GSPOOptions
    options: GSPOOptions

    def ratios(self, inputs: LossInputs) -> torch.Tensor:
        of_sequences = inputs.sequence_means(inputs.log_ratios().detach()).exp()
        return of_sequences[inputs.sequence_of_token] * _one(inputs)


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
        ratios = inputs.log_ratios().detach().exp()
        weights = ratios.clamp(1 - self.options.clip_low, 1 + self.options.clip_high)
        return -weights * inputs.advantages * inputs.logprobs

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        ratios = inputs.log_ratios().exp()
        return (ratios > 1 + self.options.clip_high) | (ratios < 1 - self.options.clip_low)


class ImportanceSampling(PolicyLoss):
    """``-r A``: unbiased for any policy that could have sampled the token, with unbounded variance."""

    needs_old_logprobs = True

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        return -inputs.log_ratios().exp() * inputs.advantages


class DPPOTVOptions(Section):
    """``algorithm.loss_options`` of ``dppo_tv``."""

    limit_low: float = Field(
        default=0.2, ge=0, le=1, description="Drop in probability above which a token with A <= 0 gets no loss."
    )
    limit_high: float = Field(
        default=0.2, ge=0, le=1, description="Rise in probability above which a token with A > 0 gets no loss."
    )


class DPPOTV(ImportanceSampling):
    """``-r A``, or 0 if the token's probability has already moved too far in the direction of ``A``.

    Too far means ``pi_theta - pi_old > limit_high`` if ``A > 0``, and ``< -limit_low`` otherwise. This bounds the total
    variation instead of the ratio, which lets improbable tokens move. Source: arXiv 2602.04879.
    """

    options_model = DPPOTVOptions
    options: DPPOTVOptions

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        return super().__call__(inputs).masked_fill(self.clipped(inputs), 0.0)

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        moved = inputs.logprobs.detach().exp() - inputs.known_old_logprobs().exp()
        return torch.where(inputs.advantages > 0, moved > self.options.limit_high, moved < -self.options.limit_low)


class CrossEntropy(PolicyLoss):
    """``-logp * A``; with advantages of 1, the negative log-likelihood of supervised training."""

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        return -inputs.logprobs * inputs.advantages


def _one(inputs: LossInputs) -> torch.Tensor:
    """``(tokens,)`` ones, whose gradient is the gradient of the log-probability."""
    return torch.exp(inputs.logprobs - inputs.logprobs.detach())
