"""Images in a vision-language model.

This module assembles the embeddings of a prompt and puts the features of every image at exactly the positions of that
image in the prompt. A model's own forward searches for its placeholder instead, so it would mistake a placeholder that
the policy sampled for an image.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from rllm_core.errors import ConfigError
from rllm_core.parser import BaseParser
from rllm_core.types import MediaChunk, PlacedMedia, TokenIds, TrainingSample
from rllm_local.head import decoder_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AGREEMENT_TOLERANCE = 1e-4
HALF_AGREEMENT_TOLERANCE = 0.1

Placement = tuple[int, MediaChunk]
"""Start position of an image (flat if there are rows), and the image."""


@runtime_checkable
class ImageSource(Protocol):
    """Methods that a parser with ``supports_media`` must provide, so that a model can read its images."""

    def media_inputs(self, chunk: MediaChunk) -> Mapping[str, npt.NDArray[Any]]:
        """Returns the arguments of the model's ``get_image_features`` for one image."""
        ...

    def media_probe(self) -> tuple[TokenIds, tuple[PlacedMedia, ...]]:
        """Returns a short prompt with one image."""
        ...


class _Features(NamedTuple):
    """Features of one image, ``(length_tokens, hidden)``, for the embeddings and for deeper layers."""

    embeddings: torch.Tensor
    deeper: list[torch.Tensor]


class Vision:
    """Reads images for one model.

    Args:
        model: A vision-language model.
        source: Source of the images.

    Attributes:
        is_planar: Whether positions within an image have three coordinates (M-RoPE) instead of a running count.
    """

    def __init__(self, model: PreTrainedModel, source: ImageSource) -> None:
        self.model: Any = model
        self.source = source
        self._embed: Any = model.get_input_embeddings()
        # The model's own method computes the planar positions of an image (M-RoPE).
        planar: Any = next((module for module in model.modules() if hasattr(module, "get_rope_index")), None)
        self._rope_index = None if planar is None else planar.get_rope_index
        self.is_planar = planar is not None
        if self._rope_index is not None:
            self._rope_arguments = inspect.signature(self._rope_index).parameters.keys()
            if "mm_token_type_ids" not in self._rope_arguments:
                raise ConfigError(f"images of {model.config.model_type!r} models need a newer transformers")

    def embedded(self, token_ids: torch.Tensor, media: Sequence[Placement]) -> dict[str, Any]:
        """Returns arguments of the decoder that replace ``input_ids``.

        Args:
            token_ids: ``(rows, tokens)``; ids at the positions of images are ignored.
            media: Images, possibly none.
        """
        embeddings = self._embed(token_ids)
        if not media:
            return {"inputs_embeds": embeddings}
        features = self._features([chunk for _, chunk in media])
        media = sorted(media, key=itemgetter(0))
        at = torch.cat([torch.arange(start, start + chunk.length_tokens) for start, chunk in media])
        at = at.to(token_ids.device)
        images = [features[chunk.sha256] for _, chunk in media]
        flat = embeddings.flatten(0, 1)
        flat = flat.index_copy(0, at, torch.cat([image.embeddings for image in images]).to(flat.dtype))
        inputs: dict[str, Any] = {"inputs_embeds": flat.view_as(embeddings)}
        if images[0].deeper:
            mask = torch.zeros(token_ids.numel(), dtype=torch.bool, device=token_ids.device).index_fill(0, at, True)
            inputs["visual_pos_masks"] = mask.view_as(token_ids)
            inputs["deepstack_visual_embeds"] = [
                torch.cat(layer) for layer in zip(*(image.deeper for image in images), strict=True)
            ]
        return inputs

    def _features(self, chunks: Sequence[MediaChunk]) -> dict[str, _Features]:
        """Returns the features of each image by its hash; images of the same shape are read together."""
        batches: dict[Any, dict[str, MediaChunk]] = {}
        inputs = {chunk.sha256: self.source.media_inputs(chunk) for chunk in chunks}
        for chunk in chunks:
            shapes = tuple((name, array.shape[1:]) for name, array in inputs[chunk.sha256].items())
            batches.setdefault(shapes, {})[chunk.sha256] = chunk
        features: dict[str, _Features] = {}
        for batch in batches.values():
            names = inputs[next(iter(batch))].keys()
            tensors = {name: self._tensor([inputs[sha256][name] for sha256 in batch]) for name in names}
            output = self.model.get_image_features(**tensors, return_dict=True)
            lengths = [chunk.length_tokens for chunk in batch.values()]
            embeddings = _split(output.pooler_output, lengths)
            deeper = [_split(layer, lengths) for layer in getattr(output, "deepstack_features", None) or ()]
            for index, sha256 in enumerate(batch):
                features[sha256] = _Features(embeddings[index], [layer[index] for layer in deeper])
        return features

    def _tensor(self, arrays: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
        return torch.tensor(np.concatenate(arrays), device=self.model.device)

    def positions(self, token_ids: npt.NDArray[Any], media: Sequence[Placement]) -> npt.NDArray[np.int64]:
        """Returns planar positions of one sequence, ``(3, tokens)``."""
        assert self._rope_index is not None
        if not media:
            return np.broadcast_to(np.arange(len(token_ids)), (3, len(token_ids)))
        media = sorted(media, key=itemgetter(0))
        kinds = torch.zeros(1, len(token_ids), dtype=torch.long)
        for start, chunk in media:
            kinds[0, start : start + chunk.length_tokens] = 1
        arrays = [self.source.media_inputs(chunk) for _, chunk in media]
        grids = {
            name: torch.tensor(np.concatenate([array[name] for array in arrays]))
            for name in arrays[0]
            if name in self._rope_arguments
        }
        ids = torch.tensor(token_ids, dtype=torch.long)[None]
        positions, _ = self._rope_index(input_ids=ids, mm_token_type_ids=kinds, **grids)
        result: npt.NDArray[np.int64] = positions[:, 0].numpy()
        return result

    def sample_positions(self, sample: TrainingSample) -> npt.NDArray[np.int64]:
        """Returns planar positions of a training sample, ``(3, tokens)``."""
        return self.positions(sample.token_ids, [(piece.start, piece) for piece in sample.media])

    def row_positions(
        self, token_ids: torch.Tensor, padding: torch.Tensor, media: Sequence[Placement]
    ) -> torch.Tensor | None:
        """Returns planar positions of a left-padded batch, ``(3, rows, tokens)``, or None if positions are counted."""
        if not self.is_planar:
            return None
        rows, tokens = token_ids.shape
        positions = np.zeros((3, rows, tokens), np.int64)
        for row, (ids, first) in enumerate(zip(token_ids.cpu().numpy(), padding.tolist(), strict=True)):
            begin = row * tokens
            own = [(start - begin - first, chunk) for start, chunk in media if begin <= start < begin + tokens]
            positions[:, row, first:] = self.positions(ids[first:], own)
        return torch.from_numpy(positions).to(token_ids.device)

    @torch.no_grad()
    def check(self) -> None:
        """Compares with the model's own forward on a prompt with an image.

        Raises:
            ConfigError: If the model reads images differently from this class.
        """
        ids, placed = self.source.media_probe()
        media = [(piece.start, piece) for piece in placed]
        token_ids = torch.tensor(ids, dtype=torch.long, device=self.model.device)[None]
        inputs = {name: self._tensor([array]) for name, array in self.source.media_inputs(placed[0]).items()}
        kinds = torch.zeros_like(token_ids)
        kinds[0, placed[0].start : placed[0].stop] = 1
        known = set(inspect.signature(self.model.forward).parameters)
        if self.is_planar:
            known.add("mm_token_type_ids")
        inputs |= {name: kinds for name in ("token_type_ids", "mm_token_type_ids") if name in known}
        theirs = self.model(input_ids=token_ids, **inputs, use_cache=False).logits
        padding = torch.zeros(1, dtype=torch.long)
        hidden = decoder_of(self.model)(
            **self.embedded(token_ids, media),
            position_ids=self.row_positions(token_ids, padding, media),
            use_cache=False,
        ).last_hidden_state
        mine = self.model.get_output_embeddings()(hidden)
        tolerance = AGREEMENT_TOLERANCE if mine.dtype == torch.float32 else HALF_AGREEMENT_TOLERANCE
        if not torch.allclose(mine, theirs, atol=tolerance, rtol=tolerance):
            raise ConfigError(
                f"backend 'local' cannot train models of type {self.model.config.model_type!r} with images: they do "
                "more than replace token embeddings by image features"
            )


def image_source(model: PreTrainedModel, parser: BaseParser | None) -> ImageSource | None:
    """Returns the parser as the source of images for ``model``, or None if either supports text only.

    Raises:
        ConfigError: If ``model`` cannot read the parser's images.
    """
    if parser is None or not parser.supports_media or not hasattr(model, "get_image_features"):
        return None
    if not isinstance(parser, ImageSource):
        raise ConfigError(f"parser {parser.name!r} has no media_inputs, which backend 'local' needs for images")
    Vision(model, parser).check()
    return parser


def _split(features: Any, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    """Splits features by image; models return one tensor for all images or one per image."""
    parts = [part.reshape(-1, part.shape[-1]) for part in features]
    return torch.split(torch.cat(parts), list(lengths))
