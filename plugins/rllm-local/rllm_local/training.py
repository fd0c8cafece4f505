"""The training path: samples to gradients to new weights.

Gradients of *summed* losses accumulate over micro-batches and passes. The counts of the whole optimizer step are
known only at its end, and the accumulated gradient is divided by them then; how a step is cut into passes therefore
changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rllm_core.algorithms.aggregation import Aggregation
from rllm_core.algorithms.corrections import Corrections
from rllm_core.algorithms.torch_losses import LossInputs, PolicyLoss, kl_estimate, losses_of
from rllm_core.backend import OptimizerStep
from rllm_core.errors import RunError
from rllm_core.types import Floats, TrainingSample
from rllm_local.packing import MicroBatch, Row, micro_batches, rows_of
from rllm_local.vision import Vision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rllm_core.config import KLConfig, OptimizerConfig

CPU_BATCH_TOKENS = 4096  # larger ones leave the caches: a small model takes a tenth longer with 8192


@dataclass(frozen=True)
class LocalBatch:
    """One pass: its samples, and the rows they are trained in."""

    samples: Sequence[TrainingSample]
    rows: list[Row]


@dataclass
class _Sums:
    """What the passes of one optimizer step add up."""

    loss: float = 0.0
    entropy: float = 0.0
    divergence: float = 0.0
    difference: float = 0.0
    max_difference: float = 0.0
    compared_tokens: int = 0
    stale_difference: float = 0.0
    stale_tokens: int = 0
    trained_tokens: int = 0


@dataclass
class Trainer:
    """Trains one model.

    Args:
        model: A causal LM in evaluation mode: dropout would make the trained policy another than the sampled one.
        loss: What to minimise.
        aggregation: How token losses become one number.
        corrections: Applied here where the proximal policy is interpolated.
        kl: Divergence from the reference that the loss takes in; None for none.
        temperature: Logits are divided by it, as they were when sampling.
        optimizer_config: AdamW and its schedule.
        share_prefixes: Whether to encode what samples have in common once.
        max_batch_tokens: Most positions per forward and backward; on the CPU, never above ``CPU_BATCH_TOKENS``.
        autocast_dtype: Precision of the forward passes; None is that of the weights.
        vision: How the model reads images; None for text only. Gradients flow through it into every trained weight.

    Attributes:
        live_version: Which version the weights are; None from an optimizer step until it goes live.
    """

    model: PreTrainedModel
    loss: PolicyLoss
    aggregation: Aggregation
    temperature: float
    optimizer_config: OptimizerConfig
    share_prefixes: bool
    max_batch_tokens: int
    autocast_dtype: torch.dtype | None = None
    vision: Vision | None = None
    corrections: Corrections = field(default_factory=lambda: Corrections([]))
    kl: KLConfig | None = None
    live_version: int | None = None
    _sums: _Sums = field(default_factory=_Sums)

    def __post_init__(self) -> None:
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        config = self.optimizer_config
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._pair_cost = _pair_cost(self.model)
        text_config: Any = self.model.config.get_text_config()
        self._full_attention = all(kind == "full_attention" for kind in getattr(text_config, "layer_types", None) or ())
        self._bare_head = self._head_is_bare()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    def batch(self, samples: Sequence[TrainingSample], *, skip_zero_advantages: bool) -> LocalBatch:
        """Lay one pass out.

        Args:
            samples: Its samples.
            skip_zero_advantages: Leave out samples whose gradient is zero; the counts do not depend on it.
        """
        if skip_zero_advantages:
            samples = [sample for sample in samples if sample.advantages.any()]
        if self.loss.needs_old_logprobs and any(sample.logprobs is None for sample in samples):
            raise RunError("algorithm.loss needs log-probabilities, but the engine returned none for some samples")
        share = self.share_prefixes and self._full_attention
        return LocalBatch(samples, rows_of(samples, share_prefixes=share, pair_cost=self._pair_cost))

    def forward_backward(self, batch: LocalBatch, entropy_coefficient: float) -> None:
        """Add the gradient of the summed losses of one pass."""
        for micro in self._micro_batches(batch):
            distributions = torch.log_softmax(self._logits(micro), -1)
            logprobs = distributions[micro.node_of_token, micro.targets]
            inputs = self._loss_inputs(micro, logprobs)
            losses = losses_of(self.loss, inputs)
            if self.kl is not None and micro.reference_logprobs is not None:
                divergence = kl_estimate(logprobs, micro.reference_logprobs, self.kl.estimator)
                losses = losses + self.kl.coefficient * divergence
                self._sums.divergence += float(divergence.detach().sum())
            if entropy_coefficient > 0:
                entropies = -(distributions.exp() * distributions).sum(-1)[micro.node_of_token]
                losses = losses - entropy_coefficient * entropies
                self._sums.entropy += float(entropies.detach().sum())
            weights = [self.aggregation.token_weight(tokens) for tokens in micro.sample_tokens]
            total = (losses * torch.tensor(weights, device=self.device)[inputs.sequence_of_token]).sum()
            total.backward()  # type: ignore[no-untyped-call]
            self._observe(micro, total, logprobs, self._is_live(batch.samples, micro.samples))

    def step(self, step: OptimizerStep) -> dict[str, float]:
        """Divide by the counts, clip, and update the weights.

        Returns:
            Metrics of the step.

        Raises:
            RunError: If the gradient is not finite; the weights are unchanged then.
        """
        count = self.aggregation.denominator(step)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        torch._foreach_div_(gradients, float(count))
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.optimizer_config.max_grad_norm))
        if not np.isfinite(norm):
            raise RunError(
                f"optimizer step {step.step}: the gradient is not finite; try a lower optimizer.learning_rate"
            )
        learning_rate = self.optimizer_config.learning_rate_at(step.step, step.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.live_version = None
        self.optimizer.step()
        torch._foreach_zero_(gradients)
        sums, self._sums = self._sums, _Sums()
        metrics = {"loss": sums.loss / count, "grad_norm": norm, "learning_rate": learning_rate}
        metrics["trained_tokens"] = float(sums.trained_tokens)
        if sums.entropy:
            metrics["entropy"] = sums.entropy / max(1, sums.trained_tokens)
        if sums.divergence:
            metrics["kl_reference"] = sums.divergence / max(1, sums.trained_tokens)
        if sums.compared_tokens:
            metrics["rollout_logprob_difference_mean"] = sums.difference / sums.compared_tokens
            metrics["rollout_logprob_difference_max"] = sums.max_difference
        if sums.stale_tokens:
            metrics["stale_logprob_difference_mean"] = sums.stale_difference / sums.stale_tokens
        return metrics

    def _loss_inputs(self, micro: MicroBatch, logprobs: torch.Tensor) -> LossInputs:
        counts = torch.tensor(micro.sample_tokens, device=self.device)
        old, advantages = micro.rollout_logprobs, micro.advantages
        if micro.proximal_logprobs is not None:
            old = micro.proximal_logprobs
        elif micro.proximal_fractions is not None and micro.rollout_logprobs is not None:
            old = torch.lerp(micro.rollout_logprobs, logprobs.detach(), micro.proximal_fractions)
            starts = np.cumsum([0, *micro.sample_tokens[:-1]])
            weights = self.corrections.weights((old - micro.rollout_logprobs).cpu().numpy(), starts)
            advantages = advantages * torch.from_numpy(weights).to(advantages)
        sequences = torch.arange(len(counts), device=self.device).repeat_interleave(counts)
        return LossInputs(logprobs, old, advantages, sequences, len(counts))

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Log-probabilities of the samples' sampled tokens, each ``(sampled_tokens,)``."""
        result: list[Any] = [None] * len(samples)
        for micro in self._micro_batches(self.batch(samples, skip_zero_advantages=False)):
            values = torch.log_softmax(self._logits(micro), -1)[micro.node_of_token, micro.targets].cpu()
            for index, part in zip(micro.samples, torch.split(values, micro.sample_tokens), strict=True):
                result[index] = part.numpy()
        return result

    def _micro_batches(self, batch: LocalBatch) -> Any:
        most = self.max_batch_tokens
        if self.device.type == "cpu":
            most = min(most, CPU_BATCH_TOKENS)
        planar = self.vision.sample_positions if self.vision is not None and self.vision.is_planar else None
        return micro_batches(batch.samples, batch.rows, max_tokens=most, device=self.device, planar_positions=planar)

    def _logits(self, micro: MicroBatch) -> torch.Tensor:
        """Logits over the temperature at the nodes, ``(nodes, vocabulary)``."""
        model: Any = self.model
        mask = None
        if micro.visible is not None:
            # Attention implementations add the mask to the scores; a padding position, which sees nothing, is never
            # read, and the lowest finite number keeps its softmax finite.
            lowest = torch.finfo(torch.float32).min
            mask = torch.zeros(micro.visible.shape, device=self.device).masked_fill_(~micro.visible, lowest)
        inputs = {"input_ids": micro.token_ids, "position_ids": micro.positions, "attention_mask": mask}
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            if micro.media:
                assert self.vision is not None
                inputs = {"position_ids": micro.positions, "attention_mask": mask}
                inputs |= self.vision.embedded(micro.token_ids, micro.media)
            if self._bare_head or micro.media:
                hidden = model.get_decoder()(**inputs, use_cache=False).last_hidden_state
                logits: torch.Tensor = model.get_output_embeddings()(hidden.flatten(0, 1)[micro.nodes])
            else:
                logits = model(**inputs, use_cache=False).logits.flatten(0, 1)[micro.nodes]
        logits = logits.float()
        return logits if self.temperature == 1 else logits / self.temperature

    @torch.no_grad()
    def _head_is_bare(self) -> bool:
        """Whether logits are just the head's product with the last hidden states (some models scale or cap them)."""
        probe = torch.arange(4, device=self.device)[None]
        model: Any = self.model
        hidden = model.get_decoder()(input_ids=probe, use_cache=False).last_hidden_state
        logits = model(input_ids=probe, use_cache=False).logits
        return torch.equal(model.get_output_embeddings()(hidden), logits)

    def _is_live(self, samples: Sequence[TrainingSample], order: Sequence[int]) -> torch.Tensor | None:
        """``(sampled_tokens,)`` which tokens the weights as they are sampled; None if they sampled all of them."""
        chosen = [samples[index] for index in order]
        turns = [version == self.live_version for sample in chosen for version in sample.weight_versions]
        if all(turns):
            return None
        lengths = [stop - start for sample in chosen for start, stop in sample.turn_spans]
        return torch.from_numpy(np.repeat(turns, lengths)).to(self.device)

    @torch.no_grad()
    def _observe(
        self, micro: MicroBatch, total: torch.Tensor, logprobs: torch.Tensor, is_live: torch.Tensor | None
    ) -> None:
        sums = self._sums
        sums.loss += float(total.detach())
        sums.trained_tokens += len(logprobs)
        if micro.rollout_logprobs is None:
            return
        difference = (logprobs - micro.rollout_logprobs).abs()
        if is_live is not None:
            stale = difference[~is_live]
            sums.stale_difference += float(stale.sum())
            sums.stale_tokens += len(stale)
            difference = difference[is_live]
        if len(difference):
            sums.difference += float(difference.sum())
            sums.max_difference = max(sums.max_difference, float(difference.max()))
            sums.compared_tokens += len(difference)


def _pair_cost(model: PreTrainedModel) -> float:
    """Cost of one attention pair relative to one token's matrix products, both counted per layer.

    A pair takes two products of head_dim per head, and about as much again for its softmax.
    """
    config: Any = model.config.get_text_config()
    embeddings = sum(p.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters())
    per_layer = (sum(p.numel() for p in model.parameters()) - embeddings) / config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return float(4 * config.num_attention_heads * head_dim / max(per_layer, 1.0))
