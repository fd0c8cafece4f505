"""Losses of the core that servers compute, and the sample weights that make them *exactly* equal.

A step's loss is ``sum_t w_s l_t / D`` (`rllm_core.algorithms.aggregation`), where ``l_t`` is the loss of a sampled
token, ``w_s`` the weight of its sequence, and ``D`` a count over the step. Every loss here is positively homogeneous in
the advantage, ``l(c A) = c l(A)`` for ``c > 0``, so scaling the advantage scales the token's loss. Servers compute:

=======  =================================  ================================
service  gradient of the optimizer step     so advantages are multiplied by
=======  =================================  ================================
hosted   ``sum_s sum_t grad l_t``           ``w_s / D``
skyrl    ``1/N sum_s 1/n_s sum_t grad l_t`` ``w_s n_s N / D``
=======  =================================  ================================

with ``n_s`` sampled tokens in sequence ``s`` (sent as ``weights``, 1 on sampled tokens) and ``N`` sequences since the
last optimizer step. For aggregations over sequences, ``D`` is ``N``. With skyrl their factor therefore does not depend
on the rest of the step, so passes can be sent while groups still arrive. Otherwise, a step is one pass.

Losses on the server (``r`` is the ratio to the old policy):

=======================  ======================================  ======================================================
``algorithm.loss``       formula                                 on the server
=======================  ======================================  ======================================================
``reinforce``            gradient ``-A grad logp``               hosted: ``cross_entropy``, its ``weights`` being ``A``.
                                                                 skyrl: ``cispo`` with both bounds at 1, because its
                                                                 ``cross_entropy`` divides by the sum of ``weights``.
``cross_entropy``        ``-A logp``                             the same
``importance_sampling``  ``-r A``                                ``importance_sampling``
``ppo_clip``             ``-min(r A, clip(r) A)``                ``ppo`` with ``clip_low_threshold = 1 - clip_low`` ...
``cispo``                ``-stop_gradient(clip(r)) A logp``      ``cispo``, likewise
=======================  ======================================  ======================================================

The only difference: the core's own losses clamp ``log r`` to +-20, but servers do not. ``dual_clip``, ``gspo`` and
``dppo_tv`` have no counterpart on servers and are rejected, as are losses of plugins, which need torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import Field

from rllm_core.algorithms.aggregation import Aggregation
from rllm_core.assembly.components import aggregation_of
from rllm_core.backend import OptimizerStep
from rllm_core.config import RunConfig, Section
from rllm_core.errors import RunError
from rllm_core.run_file import validated
from rllm_core.types import Floats, TrainingSample
from rllm_tinker.config import Service


class NoOptions(Section):
    """Options of losses that have none."""


class TinkerPPOClipOptions(Section):
    """``algorithm.loss_options`` of ``ppo_clip``."""

    clip_low: float = Field(
        default=0.2, ge=0, lt=1, description="Lower clip range: ratios below 1 - clip_low get no gradient."
    )
    clip_high: float = Field(
        default=0.2, ge=0, description="Upper clip range: ratios above 1 + clip_high get no gradient."
    )


class TinkerCISPOOptions(Section):
    """``algorithm.loss_options`` of ``cispo``."""

    clip_low: float = Field(
        default=1.0, ge=0, le=1, description="Lower clip range: weights are at least 1 - clip_low. 1 disables it."
    )
    clip_high: float = Field(default=4.0, ge=0, description="Upper clip range: weights are at most 1 + clip_high.")


OPTIONS: dict[str, type[NoOptions] | type[TinkerPPOClipOptions] | type[TinkerCISPOOptions]] = {
    "reinforce": NoOptions,
    "cross_entropy": NoOptions,
    "importance_sampling": NoOptions,
    "ppo_clip": TinkerPPOClipOptions,
    "cispo": TinkerCISPOOptions,
}
LOSSES = frozenset(OPTIONS)
WITHOUT_RATIO = frozenset({"reinforce", "cross_entropy"})


@dataclass(frozen=True)
class ServerLoss:
    """A loss of the core, in the server's terms.

    Attributes:
        name: ``algorithm.loss``.
        service: Service whose loss scale applies.
        aggregation: Aggregation of token losses.
        server_name: Name of the loss on the server.
        settings: ``loss_fn_config`` of the request.
    """

    name: str
    service: Service
    aggregation: Aggregation
    server_name: str
    settings: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig, service: Service) -> ServerLoss:
        """Builds the loss of a run.

        Raises:
            ConfigError: If ``algorithm.loss_options`` are invalid.
        """
        name, aggregation = config.algorithm.loss, aggregation_of(config)
        options = validated(OPTIONS[name], config.algorithm.loss_options, "algorithm.loss_options", ())
        if name in WITHOUT_RATIO:
            if service == "hosted":
                return cls(name, service, aggregation, "cross_entropy")
            return cls(name, service, aggregation, "cispo", _thresholds(0.0, 0.0))
        if isinstance(options, TinkerPPOClipOptions | TinkerCISPOOptions):
            server_name = "ppo" if name == "ppo_clip" else name
            return cls(name, service, aggregation, server_name, _thresholds(options.clip_low, options.clip_high))
        return cls(name, service, aggregation, name)

    @property
    def streams(self) -> bool:
        """Whether the factors of a pass are known before the rest of the step."""
        return self.service == "skyrl" and self.aggregation.name != "token_mean"

    def factors(self, samples: Sequence[TrainingSample]) -> list[float]:
        """Returns the factors for each sample's advantages.

        Args:
            samples: Training samples of the whole optimizer step, or, if `streams`, of one pass.
        """
        whole = OptimizerStep(
            step=0,
            total_steps=0,
            samples=len(samples),
            sampled_tokens=sum(sample.sampled_tokens for sample in samples),
            trajectories=0,
        )
        denominator = self.aggregation.denominator(whole)
        factors = []
        for sample in samples:
            tokens = sample.sampled_tokens
            weight = self.aggregation.token_weight(max(tokens, 1)) / denominator
            factors.append(weight * tokens * len(samples) if self.service == "skyrl" else weight)
        return factors

    def inputs(self, sample: TrainingSample, factor: float) -> dict[str, Floats]:
        """Returns the server's loss inputs besides token ids, each ``(sampled_tokens,)``.

        Raises:
            RunError: If the loss needs log-probabilities that are unknown.
        """
        advantages = (sample.advantages.astype(np.float64) * factor).astype(np.float32)
        if self.server_name == "cross_entropy":
            return {"weights": advantages}
        old = np.zeros_like(advantages) if self.name in WITHOUT_RATIO else self.old_logprobs(sample)
        arrays = {"advantages": advantages, "logprobs": old}
        if self.service == "skyrl":
            arrays["weights"] = np.ones_like(advantages)
        return arrays

    def old_logprobs(self, sample: TrainingSample) -> Floats:
        """Returns ``(sampled_tokens,)`` log-probabilities of the old policy in ratios.

        Raises:
            RunError: If the log-probabilities are unknown.
        """
        old = sample.logprobs if sample.proximal_logprobs is None else sample.proximal_logprobs
        if old is None:
            raise RunError(
                f"algorithm.loss = {self.name!r} needs the log-probabilities of the policy that sampled, but rollout "
                f"{sample.rollout_id} has none"
            )
        return old

    def token_losses(self, sample: TrainingSample, logprobs: Floats) -> Floats:
        """Returns ``(sampled_tokens,)`` unscaled losses, from log-probabilities of the trained policy."""
        advantages, losses = sample.advantages, -sample.advantages
        if self.name == "cross_entropy":
            losses = losses * logprobs
        elif self.name != "reinforce":
            ratio = np.exp(logprobs - self.old_logprobs(sample))
            low = self.settings.get("clip_low_threshold", 0.0)
            clipped = np.clip(ratio, low, self.settings.get("clip_high_threshold", np.inf))
            if self.name == "cispo":
                losses = losses * clipped * logprobs
            else:
                losses = -np.minimum(ratio * advantages, clipped * advantages)
        return losses.astype(np.float32)


def _thresholds(clip_low: float, clip_high: float) -> dict[str, float]:
    return {"clip_low_threshold": 1 - clip_low, "clip_high_threshold": 1 + clip_high}
