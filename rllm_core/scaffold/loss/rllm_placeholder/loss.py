"""``placeholder``: what each token contributes to the loss of an optimizer step."""

from __future__ import annotations

import torch
from pydantic import Field
from rllm_core.algorithms.torch_losses import LossInputs, PolicyLoss
from rllm_core.config import Section


class PlaceholderOptions(Section):
    """``algorithm.loss_options`` of ``placeholder``."""

    width: float = Field(default=0.2, gt=0, description="How far from 1 the ratio goes, at most.")


class PlaceholderLoss(PolicyLoss):
    """``-(1 + width * tanh((r - 1) / width)) * A``: as PPO's clipping, but the gradient fades instead of stopping.

    ``r`` is the probability of a token under the policy in training over that under the policy that sampled it, ``A``
    its advantage. Where the two policies are equal, the gradient is that of REINFORCE.
    """

    needs_old_logprobs = True
    options_model = PlaceholderOptions
    options: PlaceholderOptions

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        """``(tokens,)`` what each token contributes, to be minimised.

        No average is taken here: the backend takes it over the whole optimizer step, however the step is cut.
        """
        width = self.options.width
        ratio = 1 + width * torch.tanh((inputs.log_ratios().exp() - 1) / width)
        return -ratio * inputs.advantages

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        """``(tokens,)`` bool: which tokens have lost more than half of their gradient; for metrics."""
        beyond = (inputs.log_ratios().exp() - 1) / self.options.width
        return torch.tanh(beyond).square() > 0.5
