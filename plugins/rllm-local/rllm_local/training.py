"""The training path, from samples to gradients to new weights.

Gradients of *summed* losses accumulate over micro-batches and passes. The counts of the whole optimizer step are known
only at its end, when they divide the accumulated gradient. Dividing a step into passes therefore only affects rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rllm_core.algorithms.aggregation import Aggregation
from rllm_core.algorithms.corrections import Corrections, Weights
from rllm_core.algorithms.diagnostics import OffPolicyDiagnostics, token_ages
from rllm_core.algorithms.torch_losses import LossInputs, PolicyLoss, clipped_of, kl_estimate, losses_of
from rllm_core.backend import OptimizerStep, TokenMeasures, UpdateResult
from rllm_core.errors import RunError
from rllm_core.types import Floats, TrainingSample
from rllm_local.head import Head
from rllm_local.model import attention_shapes, trained_parameters, vocabulary_size
from rllm_local.packing import MicroBatch, Row, micro_batches, rows_of, tree_tokens
from rllm_local.vision import Vision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rllm_core.config import KLConfig, OptimizerConfig

logger = logging.getLogger(__name__)

EXACT_TREE_TOLERANCE = 1e-4  # of the mean difference of log-probabilities
ROUNDED_TREE_TOLERANCE = 0.25  # in bfloat16 or TF32


@dataclass(frozen=True)
class LocalBatch:
    """The samples of one pass, and their layout in rows."""

    samples: Sequence[TrainingSample]
    rows: list[Row]


@dataclass
class _Sums:
    """Sums over the passes of one optimizer step."""

    loss: float = 0.0
    entropy: float = 0.0
    divergence: float = 0.0
    max_difference: float | None = None
    trained_tokens: int = 0
    tokens: dict[str, TokenMeasures] = field(default_factory=dict)


@dataclass
class LocalTrainer:
    """Trains one model.

    Args:
        model: Causal LM in evaluation mode; with dropout, the trained policy would differ from the sampled one.
        loss: Loss to minimize.
        aggregation: Aggregation of token losses to one number.
        corrections: Off-policy corrections. Applied here if the proximal policy uses the forward pass of training.
        kl: KL divergence from the reference to add to the loss; None for none.
        temperature: Sampling temperature, which divides the logits.
        optimizer_config: Settings of AdamW and its schedule.
        share_prefixes: Whether to encode common prefixes of samples once.
        max_batch_tokens: Maximum positions per forward-backward pass.
        autocast_dtype: Precision of the forward passes; None for the precision of the weights.
        vision: Image reader; None for text only. Gradients flow through it into every trained weight.

    Attributes:
        version: Weight version that went live last.
        is_live: Whether the weights are still that version; False from an optimizer step until the next sync.
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
    version: int = 0
    is_live: bool = False
    diagnostics: OffPolicyDiagnostics = field(default_factory=OffPolicyDiagnostics)
    _sums: _Sums = field(default_factory=_Sums)

    def __post_init__(self) -> None:
        self.parameters = trained_parameters(self.model)
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
        self._head = Head(self.model, self.temperature, self.autocast_dtype)
        text_config: Any = self.model.config.get_text_config()
        self._longest_tree = tree_tokens(text_config) if self.share_prefixes else 0
        if self._longest_tree and not self._reads_trees():
            self._longest_tree = 0

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    def batch(self, samples: Sequence[TrainingSample], *, skip_zero_advantages: bool) -> LocalBatch:
        """Lays out the samples of one pass.

        Args:
            samples: Samples of the pass.
            skip_zero_advantages: Whether to omit samples whose gradient is zero. Counts do not depend on it.
        """
        if skip_zero_advantages:
            samples = [sample for sample in samples if sample.advantages.any()]
        if self.loss.needs_old_logprobs and not all(_has_old_logprobs(sample) for sample in samples):
            raise RunError("algorithm.loss needs log-probabilities, but the engine returned none for some samples")
        if self.kl is not None and any(sample.reference_logprobs is None for sample in samples):
            raise RunError("algorithm.kl needs log-probabilities of the reference model, but some samples have none")
        return self._laid_out(samples)

    def _laid_out(self, samples: Sequence[TrainingSample]) -> LocalBatch:
        return LocalBatch(samples, rows_of(samples, longest_tree=self._longest_tree, pair_cost=self._pair_cost))

    def _reads_trees(self) -> bool:
        """Returns whether two samples get the same numbers in one row as in rows of their own.

        They do if all layers are attention that respects mask and positions. They do not with biases by column,
        convolutions or recurrent states.
        """
        ids = np.arange(12) * 7919 % vocabulary_size(self.model)
        samples = [
            TrainingSample(
                group_id=0,
                rollout_id="probe",
                token_ids=np.concatenate([ids[:6], tail]),
                turn_spans=((6, 9),),
                logprobs=None,
                advantages=np.zeros(3, np.float32),
                weight_versions=(0,),
            )
            for tail in (ids[6:9], ids[9:12])
        ]
        try:
            tree, plain = (
                np.concatenate(self._logprobs(samples, rows_of(samples, longest_tree=longest, pair_cost=1e-9)))
                for longest in (sum(len(sample.token_ids) for sample in samples), 0)
            )
        except Exception as error:
            logger.warning(f"prefixes are not shared in training: the model rejects the mask of shared rows ({error})")
            return False
        is_exact = self.autocast_dtype is None and torch.get_float32_matmul_precision() == "highest"
        if np.abs(tree - plain).mean() <= (EXACT_TREE_TOLERANCE if is_exact else ROUNDED_TREE_TOLERANCE):
            return True
        logger.warning("prefixes are not shared in training: layers of this model ignore the mask of shared rows")
        return False

    def forward_backward(self, batch: LocalBatch, entropy_coefficient: float) -> None:
        """Adds the gradient of the summed losses of one pass."""
        for micro in self._micro_batches(batch):
            self._add_gradient(micro, [batch.samples[index] for index in micro.samples], entropy_coefficient)

    def _add_gradient(self, micro: MicroBatch, samples: Sequence[TrainingSample], entropy_coefficient: float) -> None:
        logprobs, entropies = self._numbers(micro, entropy=entropy_coefficient > 0)
        inputs, weights = self._loss_inputs(micro, logprobs)
        losses = losses_of(self.loss, inputs)
        if self.kl is not None:
            assert micro.reference_logprobs is not None  # see `batch`
            divergence = kl_estimate(logprobs, micro.reference_logprobs, self.kl.estimator)
            losses = losses + self.kl.coefficient * divergence
            self._sums.divergence += float(divergence.detach().sum())
        if entropies is not None:
            losses = losses - entropy_coefficient * entropies
            self._sums.entropy += float(entropies.detach().sum())
        shares = [self.aggregation.token_weight(tokens) for tokens in micro.sample_tokens]
        total = (losses * torch.tensor(shares, device=self.device)[inputs.sequence_of_token]).sum()
        total.backward()  # type: ignore[no-untyped-call]
        self._sums.loss += float(total.detach())
        self._sums.trained_tokens += len(logprobs)
        self._observe(micro, inputs, weights, samples)
        self._keep(samples, micro.sample_tokens, logprobs, entropies)

    def step(self, step: OptimizerStep) -> UpdateResult:
        """Divides the gradient by the counts, clips it, and updates the weights.

        Returns:
            Metrics of the step, and the numbers of its tokens.

        Raises:
            RunError: If the gradient is not finite; the weights stay unchanged.
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
        self.is_live = False
        self.optimizer.step()
        torch._foreach_zero_(gradients)
        sums, self._sums = self._sums, _Sums()
        metrics = {"loss": sums.loss / count, "grad_norm": norm, "learning_rate": learning_rate}
        metrics["trained_tokens"] = float(sums.trained_tokens)
        if sums.entropy:
            metrics["entropy"] = sums.entropy / max(1, sums.trained_tokens)
        if self.kl is not None:
            metrics["kl_reference"] = sums.divergence / max(1, sums.trained_tokens)
        if sums.max_difference is not None:
            metrics["rollout_logprob_difference_max"] = sums.max_difference
        return UpdateResult(metrics | self.diagnostics.flush(), sums.tokens)

    def _loss_inputs(self, micro: MicroBatch, logprobs: torch.Tensor) -> tuple[LossInputs, Weights | None]:
        """Returns the inputs of the loss, and the correction weights in them if corrections are applied here."""
        counts = torch.tensor(micro.sample_tokens, device=self.device)
        rollout, advantages, weights = micro.rollout_logprobs, micro.advantages, None
        is_unknown = rollout.isnan()
        old: torch.Tensor | None
        if micro.proximal_logprobs is not None:
            old = micro.proximal_logprobs
        elif micro.proximal_fractions is not None:
            current = logprobs.detach()
            rollout = torch.where(is_unknown, current, rollout)
            old = torch.lerp(rollout, current, micro.proximal_fractions)
            if self.corrections:
                starts = np.cumsum([0, *micro.sample_tokens[:-1]])
                weights = self.corrections.weights((old - rollout).cpu().numpy(), starts)
                advantages = advantages * torch.from_numpy(weights).to(advantages)
        else:
            old = None if is_unknown.any() else rollout
        sequences = torch.arange(len(counts), device=self.device).repeat_interleave(counts)
        return LossInputs(logprobs, old, advantages, sequences, len(counts)), weights

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Returns the log-probabilities of each sample's sampled tokens, ``(sampled_tokens,)``."""
        return self._logprobs(samples, self._laid_out(samples).rows)

    @torch.no_grad()
    def _logprobs(self, samples: Sequence[TrainingSample], rows: list[Row]) -> list[Floats]:
        result: list[Any] = [None] * len(samples)
        for micro in self._micro_batches(LocalBatch(samples, rows)):
            values = self._numbers(micro, entropy=False)[0].cpu()
            for index, part in zip(micro.samples, torch.split(values, micro.sample_tokens), strict=True):
                result[index] = part.numpy()
        return result

    def _micro_batches(self, batch: LocalBatch) -> Any:
        planar = self.vision.sample_positions if self.vision is not None and self.vision.is_planar else None
        return micro_batches(
            batch.samples,
            batch.rows,
            max_tokens=self.max_batch_tokens,
            device=self.device,
            planar_positions=planar,
        )

    def _numbers(self, micro: MicroBatch, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns log-probabilities of the sampled tokens and, with ``entropy``, entropies at them."""
        model: Any = self.model
        mask = None
        if micro.visible is not None:
            # Attention implementations add the mask to the scores. Padding positions see nothing; the lowest finite
            # number of the precision they compute in keeps their softmax finite, and their output is never read.
            lowest = torch.finfo(self.autocast_dtype or torch.float32).min
            mask = torch.zeros(micro.visible.shape, device=self.device).masked_fill_(~micro.visible, lowest)
        inputs = {"input_ids": micro.token_ids, "position_ids": micro.positions, "attention_mask": mask}
        head, nodes, tokens = self._head, micro.nodes, (micro.node_of_token, micro.targets)
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            if micro.media:
                assert self.vision is not None
                inputs = {"position_ids": micro.positions, "attention_mask": mask}
                inputs |= self.vision.embedded(micro.token_ids, micro.media)
            elif not head.takes_hidden_states:
                logits = model(**inputs, use_cache=False).logits.flatten(0, 1)[nodes]
                return head.numbers_of_logits(logits, *tokens, entropy=entropy)
            hidden = head.decoder(**inputs, use_cache=False).last_hidden_state
        return head.numbers(hidden.flatten(0, 1)[nodes], *tokens, entropy=entropy)

    def _keep(
        self,
        samples: Sequence[TrainingSample],
        lengths: Sequence[int],
        logprobs: torch.Tensor,
        entropies: torch.Tensor | None,
    ) -> None:
        """Keeps the per-token numbers for the result of the step."""
        ends = np.cumsum(lengths)[:-1]
        parts = [
            [None] * len(samples) if values is None else np.split(values.detach().cpu().numpy(), ends)
            for values in (logprobs, entropies)
        ]
        for sample, known, undecided in zip(samples, *parts, strict=True):
            self._sums.tokens[sample.sample_id] = TokenMeasures(logprobs=known, entropies=undecided)

    @torch.no_grad()
    def _observe(
        self, micro: MicroBatch, inputs: LossInputs, weights: Weights | None, samples: Sequence[TrainingSample]
    ) -> None:
        """Adds to the diagnostics. Weights change only in `step`, so the policy in training is the proximal one."""
        log_ratios = (inputs.logprobs - micro.rollout_logprobs).cpu().numpy()
        ages = token_ages(samples, self.version)
        if micro.proximal_logprobs is None:  # Otherwise the core has already added the ratios.
            self.diagnostics.add(micro.advantages.cpu().numpy(), ages, log_ratios=log_ratios, weights=weights)
        clipped = clipped_of(self.loss, inputs)
        if clipped is not None:
            self.diagnostics.add(inputs.advantages.cpu().numpy(), ages, clipped=clipped.cpu().numpy())
        live = np.abs(log_ratios[(ages == 0) & ~np.isnan(log_ratios)]) if self.is_live else log_ratios[:0]
        if len(live):
            self._sums.max_difference = max(self._sums.max_difference or 0.0, float(live.max()))


def _has_old_logprobs(sample: TrainingSample) -> bool:
    """Returns whether the denominator of a sample's ratio is known."""
    fractions = sample.proximal_fractions
    return (
        sample.logprobs is not None
        or sample.proximal_logprobs is not None
        or (fractions is not None and bool((fractions == 1).all()))
    )


def _pair_cost(model: PreTrainedModel) -> float:
    """Returns the cost of one attention pair relative to one token's matrix products.

    A pair costs two products of head_dim per head, and about as much again for its softmax.
    """
    embeddings = sum(p.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters())
    weights = sum(p.numel() for p in model.parameters()) - embeddings
    return float(4 * sum(shape.heads * shape.head_dim for shape in attention_shapes(model)) / max(weights, 1))
