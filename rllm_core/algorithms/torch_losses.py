"""Policy losses in torch, for backends that train with it. The core itself never imports this module.

A loss sees every sampled token of a micro-batch at once, in tensors of shape ``(tokens,)``, and returns what each of
them contributes, to be *minimised*. It does no averaging: the backend aggregates with the counts of the whole
optimizer step. ``logprobs`` carries the gradient; the others are constants.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from rllm_core.config import Section
from rllm_core.errors import ConfigError
from rllm_core.run_file import validated

if TYPE_CHECKING:
    from rllm_core.config import AlgorithmConfig

MAX_LOG_RATIO = 20.0


class PolicyLoss(ABC):
    """Per-token losses, selected by ``algorithm.loss``.

    Attributes:
        needs_rollout_logprobs: Whether samples must carry the log-probabilities they were sampled with.
        takes_proximal_logprobs: Whether it is called with ``proximal_logprobs`` where the run file asks for them.
        options_model: What ``algorithm.loss_options`` may hold; nothing unless a loss says otherwise.
        options: Those options, checked.

    Raises:
        ConfigError: If the options are not what the model says.
    """

    needs_rollout_logprobs: ClassVar[bool] = False
    takes_proximal_logprobs: ClassVar[bool] = False
    options_model: ClassVar[type[Section]] = Section

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.options: Section = validated(self.options_model, config.loss_options, "algorithm.loss_options", ())
        if config.proximal_logprobs and not self.takes_proximal_logprobs:
            raise ConfigError(f"algorithm.proximal_logprobs must be false: loss {config.loss!r} makes no use of them")

    @abstractmethod
    def __call__(
        self, logprobs: torch.Tensor, rollout_logprobs: torch.Tensor | None, advantages: torch.Tensor
    ) -> torch.Tensor:
        """Losses of shape ``(tokens,)``.

        Args:
            logprobs: ``(tokens,)`` of the policy that is trained, with gradient.
            rollout_logprobs: ``(tokens,)`` of the policy that sampled, or None if they are unknown.
            advantages: ``(tokens,)``.
        """


class Reinforce(PolicyLoss):
    """``-exp(logp - stop_gradient(logp)) * A``: the policy gradient of Williams (1992), exact on policy.

    Its value is ``-A``, its gradient ``-A * grad logp``. Off policy it is biased, and corrects nothing.
    """

    def __call__(
        self, logprobs: torch.Tensor, rollout_logprobs: torch.Tensor | None, advantages: torch.Tensor
    ) -> torch.Tensor:
        """See `PolicyLoss`."""
        return -torch.exp(logprobs - logprobs.detach()) * advantages


class PPOClipOptions(Section):
    """``algorithm.loss_options`` of ``ppo_clip``."""

    clip_low: float = Field(default=0.2, ge=0, lt=1, description="Ratios below 1 - clip_low get no gradient.")
    clip_high: float = Field(default=0.2, ge=0, description="Ratios above 1 + clip_high get no gradient.")


class PPOClip(PolicyLoss):
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r`` the ratio to the policy that sampled.

    With ``algorithm.proximal_logprobs`` the ratio is the one to the policy before the step, as if that had sampled.

    Source: PPO, arXiv 1707.06347, eq. 7; separate bounds as in DAPO, arXiv 2503.14476. The log of the ratio is
    clamped to +-20, so that a token the policy has abandoned gives a large number and not an infinite one.
    """

    needs_rollout_logprobs = True
    takes_proximal_logprobs = True
    options_model = PPOClipOptions
    options: PPOClipOptions

    def __call__(
        self,
        logprobs: torch.Tensor,
        rollout_logprobs: torch.Tensor | None,
        advantages: torch.Tensor,
        proximal_logprobs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `PolicyLoss`."""
        before = rollout_logprobs if proximal_logprobs is None else proximal_logprobs
        if before is None:
            raise ValueError("ppo_clip needs the log-probabilities of the policy that sampled")
        ratio = torch.exp((logprobs - before).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        clipped = ratio.clamp(1 - self.options.clip_low, 1 + self.options.clip_high)
        return -torch.minimum(ratio * advantages, clipped * advantages)
