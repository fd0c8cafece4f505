"""``placeholder``: contribution of each token to the loss of an optimizer step."""

from __future__ import annotations

import torch
from pydantic import Field
from rllm_core.algorithms.torch_losses import LossInputs, PolicyLoss
from rllm_core.config import Section


class PlaceholderOptions(Section):
    """``algorithm.loss_options`` of ``placeholder``."""

    width: float = Field(default=0.2, gt=0, description="Maximum distance of the ratio from 1.")


class PlaceholderLoss(PolicyLoss):
    """``-(1 + width * tanh((r - 1) / width)) * A``: like PPO clipping, but the gradient fades gradually.

    ``r`` is the probability of a token under the trained policy divided by its probability under the policy that
    sampled it; ``A`` is its advantage. If the two policies are equal, the gradient is that of REINFORCE.
    """

    needs_old_logprobs = True
    options_model = PlaceholderOptions
    options: PlaceholderOptions

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """Returns ``(tokens,)`` losses to minimize.

        Do not average here. The backend averages over the whole optimizer step, even if it is split into passes.
        """
        width = self.options.width
        ratio = 1 + width * torch.tanh((inputs.log_ratios().exp() - 1) / width)
        return -ratio * inputs.advantages

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        """Returns ``(tokens,)`` bool: tokens that lost more than half of their gradient, for metrics."""
        beyond = (inputs.log_ratios().exp() - 1) / self.options.width
        return torch.tanh(beyond).square() > 0.5
