"""A loss with a saturating ratio."""

import torch
from pydantic import Field

from rllm_core.algorithms.torch_losses import PolicyLoss
from rllm_core.config import Section


class SoftClipOptions(Section):
    """Parameters of ``soft_clip``."""

    width: float = Field(default=0.3, gt=0, description="How far the log ratio goes before it saturates.")


class SoftClip(PolicyLoss):
    """``-width * tanh(log r / width) * A``: on policy, the gradient of REINFORCE."""

    needs_old_logprobs = True
    options_model = SoftClipOptions
    options: SoftClipOptions

    def __call__(self, inputs):
        width = self.options.width
        return -width * torch.tanh(inputs.log_ratios() / width) * inputs.advantages
