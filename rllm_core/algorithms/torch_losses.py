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
from typing import ClassVar, Literal

import torch
from pydantic import Field

from rllm_core.algorithms.corrections import MAX_LOG_RATIO
from rllm_core.algorithms.options import Configured
from rllm_core.config import Section
from rllm_core.errors import RunError
from rllm_core.loading import one_line


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
        if self.old_logprobs is None:
            raise ValueError("the log-probabilities of the policy that sampled are unknown, and the loss needs them")
        return (self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

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
        """``(tokens,)`` bool: which tokens get no gradient because their ratio went too far; None if none ever do."""
        return None


def losses_of(loss: PolicyLoss, inputs: LossInputs) -> torch.Tensor:
    """``(tokens,)`` what a loss says, checked, since a wrong shape would be broadcast without a word.

    Raises:
        RunError: If it fails, or does not say one finite loss per token though the policy is sound.
    """
    try:
        losses = loss(inputs)
    except Exception as error:  # it may be anybody's
        raise RunError(f"{loss.label} failed: {one_line(error)}") from error
    if not isinstance(losses, torch.Tensor) or losses.shape != inputs.logprobs.shape:
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, torch.Tensor) else f"a {type(losses).__name__}"
        raise RunError(f"{loss.label} must return one loss per token, {tuple(inputs.logprobs.shape)}, not {found}")
    if not torch.isfinite(losses.detach()).all() and torch.isfinite(inputs.logprobs.detach()).all():
        raise RunError(f"{loss.label} returned losses that are not finite")
    return losses


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

    Source: PPO, arXiv 1707.06347, eq. 7; separate bounds as in DAPO, arXiv 2503.14476.
    """

    needs_old_logprobs = True
    options_model = PPOClipOptions
    options: PPOClipOptions

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        ratio = inputs.log_ratios().exp()
        clipped = ratio.clamp(1 - self.options.clip_low, 1 + self.options.clip_high)
        return -torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        """See `PolicyLoss`."""
        ratio = inputs.log_ratios().exp()
        too_high = (ratio > 1 + self.options.clip_high) & (inputs.advantages > 0)
        return too_high | ((ratio < 1 - self.options.clip_low) & (inputs.advantages < 0))


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
    return x.square() / 2 if estimator == "k2" else x.exp() - x - 1
