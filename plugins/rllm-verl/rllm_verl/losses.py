"""Policy losses: verl's own losses where they exist; all others, from the core or plugins, through verl's registry.

``NATIVE`` lists the losses that verl has under another name. The others run as `PolicyLoss` in verl's registry: verl
passes them the same tensors, and aggregates their results with the same counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rllm_core.assembly.algorithm import policy_loss
from rllm_core.assembly.components import aggregation_of
from rllm_core.config import RunConfig
from rllm_core.plugins import PluginManager
from rllm_verl import verl_api

if TYPE_CHECKING:
    import torch

# ppo_clip does not bound ratios at negative advantages, but verl's loss does; this bound is never reached.
NO_DUAL_CLIP = 1e9

AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean_token_mean": "seq-mean-token-mean",
    "sequence_mean_token_sum": "seq-mean-token-sum",
    "sequence_mean_token_sum_norm": "seq-mean-token-sum-norm",
}
NATIVE = {"ppo_clip": "vanilla", "dual_clip": "vanilla", "gspo": "gspo", "cispo": "cispo"}
REGISTERED_PREFIX = "rllm:"


@dataclass(frozen=True)
class VerlLoss:
    """The policy loss of a run, in verl's terms.

    Attributes:
        config: Run file.
        plugins: Plugins that provide losses.
    """

    config: RunConfig
    plugins: PluginManager

    @property
    def mode(self) -> str:
        """Value of verl's ``policy_loss.loss_mode``."""
        name = self.config.algorithm.loss
        return NATIVE.get(name, f"{REGISTERED_PREFIX}{name}")

    @cached_property
    def loss(self) -> Any:
        """The configured `rllm_core.algorithms.torch_losses.PolicyLoss`, with checked options."""
        return policy_loss(self.config, self.plugins)

    def actor_settings(self) -> dict[str, Any]:
        """Loss settings for verl's ``actor`` section, by key."""
        algorithm, aggregation = self.config.algorithm, aggregation_of(self.config)
        settings: dict[str, Any] = {
            "policy_loss": {"loss_mode": self.mode},
            "loss_agg_mode": AGGREGATIONS[aggregation.name],
            "loss_scale_factor": aggregation.norm_tokens if aggregation.name.endswith("_norm") else None,
            "entropy_coeff": algorithm.entropy_coefficient,
            "use_kl_loss": self.needs_reference,
            "kl_loss_coef": algorithm.kl.coefficient,
            "kl_loss_type": algorithm.kl.estimator,
        }
        if algorithm.loss in NATIVE:
            options = self.loss.options
            settings |= {
                "clip_ratio": options.clip_low,
                "clip_ratio_low": options.clip_low,
                "clip_ratio_high": options.clip_high,
                "clip_ratio_c": getattr(options, "dual_clip", NO_DUAL_CLIP),
            }
        return settings

    @property
    def needs_reference(self) -> bool:
        """Whether the KL divergence from the reference model is part of the loss."""
        kl = self.config.algorithm.kl
        return kl.coefficient > 0 and kl.place == "loss"

    def register(self) -> None:
        """Registers the loss with verl, in the training process, unless verl has its own; replaces verl's divergence.

        verl bounds k3 by 10, so tokens far from the reference get no gradient.
        """
        verl_api.replace("kl_penalty", _divergence)
        if self.mode.startswith(REGISTERED_PREFIX):
            verl_api.use("register_policy_loss")(self.mode)(self._masked_loss)

    def _masked_loss(
        self,
        *,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str,
        config: Any,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Policy loss with verl's signature; tensors ``(rows, response_tokens)``, the mask True on sampled tokens."""
        from rllm_core.algorithms.torch_losses import LossInputs, clipped_of, losses_of

        assert rollout_is_weights is None  # corrections are already part of the advantages
        mask = response_mask.bool()
        counts = mask.sum(1)
        sequences = counts[counts > 0]
        old = old_log_prob[mask] if self.loss.needs_old_logprobs else None
        inputs = LossInputs(
            log_prob[mask],
            old,
            advantages[mask],
            _sequence_of_token(sequences),
            len(sequences),
        )
        metrics: dict[str, Any] = {}
        if len(sequences):
            found = losses_of(self.loss, inputs)
            # Use the dtype of the losses: under autocast, it may differ from that of the log-probabilities.
            losses = found.new_zeros(log_prob.shape).masked_scatter(mask, found)
            clipped = clipped_of(self.loss, inputs)
            if clipped is not None:
                metrics["actor/pg_clipfrac"] = float(clipped.float().mean())
        else:  # filler rows only; every rank must still take part in the backward pass
            losses = log_prob * 0
        total = verl_api.use("agg_loss")(
            loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
        )
        return total, metrics


def _divergence(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: Any) -> torch.Tensor:
    """`kl_estimate` with verl's signature."""
    from rllm_core.algorithms.torch_losses import kl_estimate

    return kl_estimate(logprob, ref_logprob, kl_penalty)


def _sequence_of_token(counts: torch.Tensor) -> torch.Tensor:
    """Returns the ``(tokens,)`` sequence index of each token, from ``(sequences,)`` token counts."""
    import torch

    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
