"""Policy losses in torch, for backends that train with torch. The core itself never imports this module.

A loss gets all sampled tokens of a micro-batch at once, in tensors of shape ``(tokens,)``. It returns each token's
contribution, to be *minimized*, without averaging: the backend aggregates with the counts of the whole optimizer step
(`rllm_core.algorithms.aggregation`). ``logprobs`` carries the gradient; the other inputs are constants.

``r`` is the ratio ``pi_theta / pi_old`` of a token. Its log is clamped to +-20, so a token that the policy has
abandoned yields a large but finite number. ``A`` is the token's advantage, including any correction weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from rllm_core.algorithms.corrections import MAX_LOG_RATIO
from rllm_core.algorithms.options import Configured
from rllm_core.errors import RunError
from rllm_core.moved import moved_names

__getattr__ = moved_names(__name__)


@dataclass(frozen=True)
class LossInputs:
    """Sampled tokens of some sequences, one sequence after another.

    Attributes:
        logprobs: ``(tokens,)`` log-probabilities under the policy in training, with gradient.
        old_logprobs: ``(tokens,)`` log-probabilities under the denominator of the ratio
            (``algorithm.proximal_policy``), or None if unknown.
        advantages: ``(tokens,)`` advantages.
        sequence_of_token: ``(tokens,)`` int64 index of each token's sequence, from 0.
        sequences: Number of sequences. Each has at least one token.
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
            raise ValueError("the loss needs log-probabilities of the sampling policy, but they are unknown")
        return self.old_logprobs

    def sequence_means(self, values: torch.Tensor) -> torch.Tensor:
        """``(sequences,)`` mean of ``values`` over the tokens of each sequence."""
        zeros = values.new_zeros(self.sequences)
        sums = zeros.index_add(0, self.sequence_of_token, values)
        return sums / zeros.index_add(0, self.sequence_of_token, torch.ones_like(values))


class PolicyLoss(Configured, ABC):
    """Per-token losses, selected by ``algorithm.loss``.

    Attributes:
        needs_old_logprobs: Whether samples must carry old log-probabilities (`LossInputs.old_logprobs`).
    """

    needs_old_logprobs: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """Losses of shape ``(tokens,)``."""

    def clipped(self, inputs: LossInputs) -> torch.Tensor | None:
        """``(tokens,)`` bool: tokens that count less, or not at all, because their ratio is out of bounds.

        Used for metrics. None if the loss has no bound.
        """
        return None


def losses_of(loss: PolicyLoss, inputs: LossInputs) -> torch.Tensor:
    """``(tokens,)`` result of a loss, checked because torch would silently broadcast a wrong shape.

    Raises:
        RunError: If the loss fails, changes its inputs, or does not return one finite loss per token for finite
            log-probabilities, with a gradient. Also in the backward pass, if that gradient is not finite.
    """
    is_finite = bool(torch.isfinite(inputs.logprobs.detach()).all())
    if inputs.logprobs.requires_grad:
        # A copy, so that the gradient that reaches it is that of the loss alone.
        inputs = replace(inputs, logprobs=inputs.logprobs.clone())
        if is_finite:
            inputs.logprobs.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: _check_gradient(loss, gradient)
            )
    given = [value for value in vars(inputs).values() if isinstance(value, torch.Tensor)]
    versions = [value._version for value in given]
    losses = loss.attempt(loss, inputs)
    if [value._version for value in given] != versions:
        raise RunError(f"{loss.label} changed its inputs in place; let it compute new tensors")
    if not isinstance(losses, torch.Tensor) or losses.shape != inputs.logprobs.shape:
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, torch.Tensor) else f"a {type(losses).__name__}"
        raise RunError(f"{loss.label} must return one loss per token, {tuple(inputs.logprobs.shape)}, not {found}")
    if not losses.is_floating_point():
        raise RunError(f"{loss.label} must return floating-point losses, not {losses.dtype}")
    if is_finite and not torch.isfinite(losses.detach()).all():
        raise RunError(f"{loss.label} returned losses that are not finite")
    if inputs.logprobs.requires_grad and not losses.requires_grad:
        raise RunError(
            f"{loss.label} returned losses without a gradient; compute them from inputs.logprobs, without detach(), "
            "item() or torch.no_grad()"
        )
    return losses


def _check_gradient(loss: PolicyLoss, gradient: torch.Tensor) -> None:
    if not torch.isfinite(gradient).all():
        raise RunError(f"{loss.label} returned finite losses whose gradient is not finite")


def clipped_of(loss: PolicyLoss, inputs: LossInputs) -> torch.Tensor | None:
    """``(tokens,)`` bool result of `PolicyLoss.clipped`, checked like the losses.

    Raises:
        RunError: If the method fails, or does not return one bool per token.
    """
    clipped = loss.attempt(loss.clipped, inputs)
    if clipped is None:
        return None
    if not isinstance(clipped, torch.Tensor) or clipped.dtype != torch.bool or clipped.shape != inputs.logprobs.shape:
        raise RunError(f"{loss.label}: clipped() must return one bool per token, as a tensor")
    return clipped


def kl_estimate(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """``(tokens,)`` estimates as in `rllm_core.algorithms.kl.kl_estimate`, with gradient.

    As a loss, k1 has a gradient of zero on average, and k2 has the gradient of the divergence.
    """
    x = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -x
    return x.square() / 2 if estimator == "k2" else x.expm1() - x
