"""Forward passes of the sampler: their protocol, and transformers' own. `rllm_local.fused` has a faster one.

All decoders prefill a left-padded batch of prompts, then read one token per row and step. The key-value cache can be
indexed by row, so that a group shares its prompt and finished rows leave the batch.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import DynamicCache

from rllm_local.head import decoder_of
from rllm_local.vision import ImageSource, Placement, Vision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_TOLERANCE = 0.25
"""Of the mean difference of log-probabilities, in standard deviations of the logits.

Rounding to bfloat16 changes 0.01, and more where a token is just routed to another expert; wrong states change 1.
"""

EXACT_PROBE_TOLERANCE = 0.005
"""The same in float32, whose rounding changes 0.000005, and 0.001 as TF32; a wrong convolution may change just 0.06."""


class Decoder(Protocol):
    """A forward pass with a key-value cache."""

    def prefill(self, prompts: torch.Tensor, padding: torch.Tensor, media: Sequence[Placement] = ()) -> torch.Tensor:
        """Resets the cache, reads ``prompts`` and returns the logits after each.

        Args:
            prompts: ``(rows, tokens)``, padded on the left.
            padding: Number of padding positions of each row, ``(rows,)``.
            media: Images in the prompts; always empty except for a `TransformersDecoder` with ``images``.

        Returns:
            ``(rows, vocabulary)`` in float32.
        """
        ...

    def select(self, rows: torch.Tensor) -> None:
        """Replaces the cache's rows by ``cache[rows]``; rows may repeat or be omitted."""
        ...

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Reads one more token per row, ``(rows,)``.

        Returns:
            Logits ``(rows, vocabulary)`` in float32; the next step may overwrite them.
        """
        ...

    def release(self) -> None:
        """Releases the cache at the end of a batch."""
        ...

    def logits(self, prompts: torch.Tensor, padding: torch.Tensor, count: int) -> torch.Tensor:
        """Reads ``prompts`` like `prefill`, and returns the logits after each prompt's last ``count`` tokens.

        Returns:
            ``(rows, count, vocabulary)`` in float32; logits after padding are meaningless.
        """
        ...

    def copied(self, model: PreTrainedModel, into: Any = None) -> Any:
        """Returns a copy of the weights of ``model``, for `use`. Another thread may be decoding meanwhile.

        Args:
            model: Model in training.
            into: Weights that no thread reads, which may be overwritten: `weights`, or an unused result of this method.
        """
        ...

    @property
    def weights(self) -> Any:
        """The weights in use."""
        ...

    def use(self, weights: Any) -> None:
        """Switches to weights returned by `copied`; call only between batches."""
        ...


class TransformersDecoder:
    """Decodes with any causal LM that transformers can run, including adapters.

    Args:
        model: Model in training.
        shared: Whether to decode with ``model`` itself. Otherwise the decoder keeps a copy, so that training can
            continue while older weights are sampled from.
        images: Source of images; None for text only.
        autocast_dtype: Precision of the forward passes in training; None for the precision of the weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        shared: bool,
        images: ImageSource | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        self._shared = shared
        self._autocast = partial(
            torch.autocast, model.device.type, autocast_dtype, enabled=autocast_dtype is not None, cache_enabled=False
        )
        self._model: Any = model if shared else copy.deepcopy(model).requires_grad_(False)
        self._decoder = decoder_of(self._model)
        self._own: dict[str, torch.Tensor] = {} if shared else dict(self._model.named_parameters())
        self._vision = None if images is None else Vision(self._model, images)
        self._cache = DynamicCache(config=model.config)
        self._last_position = (max_model_tokens(model) or sys.maxsize) - 1
        self._attention_mask = torch.empty(0)
        self._behind: torch.Tensor | None = None  # (rows, 1): token count minus position.

    @torch.no_grad()
    def copied(self, model: PreTrainedModel, into: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """See `Decoder`; frozen weights never change and are omitted."""
        if self._shared:
            return {}
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        return {name: into[name].copy_(p) if into else p.clone() for name, p in trained.items()}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """See `Decoder`."""
        return self._own

    @torch.no_grad()
    def use(self, weights: dict[str, torch.Tensor]) -> None:
        """See `Decoder`."""
        for name, weight in weights.items():
            self._own[name].copy_(weight)

    def prefill(self, prompts: torch.Tensor, padding: torch.Tensor, media: Sequence[Placement] = ()) -> torch.Tensor:
        """See `Decoder`."""
        self._cache = DynamicCache(config=self._model.config)
        columns = torch.arange(prompts.shape[1], device=prompts.device)
        self._attention_mask = (columns >= padding[:, None]).long()
        self._behind = None
        positions = (columns - padding[:, None]).clamp_(min=0)
        if not media:
            return self._forward(prompts, positions)
        assert self._vision is not None
        planar = self._vision.row_positions(prompts, padding, media)
        if planar is not None:
            self._behind = positions[:, -1:] - planar.amax((0, 2))[:, None]
            positions = planar
        with self._autocast():
            hidden = self._decoder(
                **self._vision.embedded(prompts, media),
                attention_mask=self._attention_mask,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
            ).last_hidden_state
            logits: torch.Tensor = self._model.get_output_embeddings()(hidden[:, -1])
        return logits.float()

    def logits(self, prompts: torch.Tensor, padding: torch.Tensor, count: int) -> torch.Tensor:
        """See `Decoder`."""
        columns = torch.arange(prompts.shape[1], device=prompts.device)
        with self._autocast():
            output = self._model(
                input_ids=prompts,
                attention_mask=(columns >= padding[:, None]).long(),
                position_ids=(columns - padding[:, None]).clamp_(min=0),
                use_cache=False,
                logits_to_keep=count,
            )
        logits: torch.Tensor = output.logits.float()
        return logits

    def select(self, rows: torch.Tensor) -> None:
        """See `Decoder`."""
        states: Any = self._cache
        states.reorder_cache(rows)  # Layers of linear attention have no `batch_select_indices`.
        self._attention_mask = self._attention_mask[rows]
        if self._behind is not None:
            self._behind = self._behind[rows]

    @torch.no_grad()
    def agrees_with_itself(self, vocabulary_size: int, *, is_exact: bool) -> bool:
        """Returns whether padding and cache of this model give the logits of a forward pass without either.

        Args:
            vocabulary_size: Number of ids that the model reads.
            is_exact: Whether forward passes compute in float32, or as TF32.
        """
        whole = torch.arange(8, device=self._model.device)[None] * 7919 % vocabulary_size
        none = whole.new_zeros(1)
        plain = torch.cat([self.logits(part, none, 1)[:, 0] for part in (whole[:, :3], whole[:, :6], whole)])
        short = torch.nn.functional.pad(whole[:, :3], (3, 0))
        found = [self.prefill(torch.cat([short, whole[:, :6]]), torch.tensor([3, 0], device=whole.device))]
        self.select(torch.tensor([1, 1], device=whole.device))
        for token in whole[0, 6:]:
            last = self.step(token.expand(2))
        self.release()
        errors = (torch.cat([*found, last[:1]]).log_softmax(-1) - plain.log_softmax(-1)).abs()
        tolerance = EXACT_PROBE_TOLERANCE if is_exact else PROBE_TOLERANCE
        return bool((errors.mean(-1) <= tolerance * plain.std(-1)).all())

    def release(self) -> None:
        """See `Decoder`."""
        self._cache = DynamicCache(config=self._model.config)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Decoder`."""
        count = self._attention_mask.sum(1, keepdim=True)
        self._attention_mask = torch.cat([self._attention_mask, torch.ones_like(count)], 1)
        if self._behind is not None:
            return self._forward(tokens[:, None], (count - self._behind).expand(3, -1, -1))
        # Rows that have ended may stay in the batch, and would otherwise leave the model's positions.
        return self._forward(tokens[:, None], count.clamp(max=self._last_position))

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            output = self._model(
                input_ids=tokens,
                attention_mask=self._attention_mask,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits


def max_model_tokens(model: PreTrainedModel) -> int | None:
    """Returns the maximum number of positions of a model; None if its positions have no limit, as Bloom's.

    With the rope type longrope, a longer sequence rotates every position differently, also those that are already in
    the cache and those of other sequences of a batch. So all sequences are short ones.
    """
    config: Any = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return int(rope["original_max_position_embeddings"])
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next((int(limit) for limit in limits if limit is not None), None)
