"""Packs training samples into rows of tensors.

A **row** holds one or more samples as a tree. A common prefix (the prompt of a group, the same answer in several
rollouts, the first turns of a game) is encoded once, and every token sees only its ancestors. Positions are depths in
the tree, so the results equal those of separate rows, with a fraction of the tokens. A row with one sample is an
ordinary causal sequence and needs no mask.

The last token of a sample is predicted but never read, so the row does not contain it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rllm_core.types import Floats, PlacedMedia, TokenIds, TrainingSample
from rllm_local.vision import Placement

QUADRATIC_FROM_TOKENS = 1024
WINDOWS = ("sliding_window", "window_size", "attention_window_size")
"""Names of the window in configurations without ``layer_types``, such as those of Mistral and GPT-Neo."""
PlanarPositions = Callable[[TrainingSample], npt.NDArray[np.int64]]
"""Maps a sample to its positions, ``(3, tokens)``."""


@dataclass(frozen=True)
class Row:
    """The samples of one row, ordered so that neighbors share the longest prefixes.

    Attributes:
        samples: Indices of the samples in the pass.
        shared: Per sample, the length of the prefix it shares with the previous sample in the row.
        tokens: Number of tokens in the row; shared tokens count once.
    """

    samples: tuple[int, ...]
    shared: tuple[int, ...]
    tokens: int

    @property
    def is_tree(self) -> bool:
        """Whether the row has branches and needs a mask."""
        return len(self.samples) > 1


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward-backward pass.

    ``nodes`` are the distinct positions whose output predicts a sampled token. ``node_of_token`` maps each sampled
    token to its node. Rollouts with the same samples share nodes.

    Attributes:
        token_ids: ``(rows, tokens)``, padded on the right.
        positions: ``(rows, tokens)``; ``(3, rows, tokens)`` for images of models with planar positions; None if every
            row is one plain sequence.
        visible: Columns each position sees, ``(rows, 1, tokens, tokens)``; None for plain causal attention.
        nodes: Flat positions in ``token_ids``, ``(nodes,)``.
        node_of_token: ``(sampled_tokens,)``.
        targets: Sampled tokens, ``(sampled_tokens,)``.
        rollout_logprobs: ``(sampled_tokens,)``, NaN in samples without them.
        proximal_logprobs: ``(sampled_tokens,)``, or None if the run file does not require them.
        proximal_fractions: ``(sampled_tokens,)``, or None likewise.
        reference_logprobs: ``(sampled_tokens,)``, or None likewise.
        advantages: ``(sampled_tokens,)``.
        media: Images with their flat start positions in ``token_ids``.
        samples: Indices of the samples in the pass, in the order of their tokens.
        sample_tokens: Number of sampled tokens per sample.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor | None
    visible: torch.Tensor | None
    nodes: torch.Tensor
    node_of_token: torch.Tensor
    targets: torch.Tensor
    rollout_logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor | None
    proximal_fractions: torch.Tensor | None
    reference_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    media: list[Placement]
    samples: list[int]
    sample_tokens: list[int]


def tree_tokens(config: Any) -> float:
    """Returns how many tokens a row with branches may have in a model with this configuration; 0 if none.

    The mask of such a row says which tokens a position sees, and knows no windows of attention.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds:
        return math.inf if kinds == {"full_attention"} else 0
    windows = [getattr(config, name, None) for name in WINDOWS]
    return min((window for window in windows if isinstance(window, int)), default=math.inf)


def rows_of(samples: Sequence[TrainingSample], *, longest_tree: float, pair_cost: float) -> list[Row]:
    """Assigns samples to rows, plain rows first and shorter rows before longer ones.

    Samples with the same first prompt (of P tokens) may share rows. If each adds L tokens of its own, a row of n costs
    ``P + n L`` tokens and ``(P + n L)^2`` attention pairs. The cost per sample is lowest at
    ``n = sqrt(P (P + 1 / pair_cost)) / L``.

    Args:
        samples: Samples of one pass.
        longest_tree: Maximum number of tokens of a row with several samples; 0 for one sample per row.
        pair_cost: Cost of one attention pair relative to one token's matrix products.
    """

    def alone(index: int) -> Row:
        return Row((index,), (0,), len(samples[index].token_ids) - 1)

    if not longest_tree:
        return sorted(map(alone, range(len(samples))), key=lambda row: row.tokens)
    groups: dict[tuple[bytes, tuple[PlacedMedia, ...]], list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        # Equal placeholders may represent different images, so only samples with the same images share prefixes.
        groups[sample.token_ids[: sample.prompt_tokens].tobytes(), sample.media].append(index)
    rows = []
    for members in groups.values():
        read = {index: samples[index].token_ids[:-1] for index in members}
        members.sort(key=lambda index: read[index].astype(">i4").tobytes())
        shared = [0, *(_common_prefix(read[a], read[b]) for a, b in pairwise(members))]
        prompt = samples[members[0]].prompt_tokens
        own = sum(len(read[index]) - max(prompt, common) for index, common in zip(members, shared, strict=True))
        most = math.sqrt(prompt * (prompt + 1 / pair_cost)) * len(members) / max(own, 1)
        count = min(len(members), math.ceil(len(members) / max(1.0, most)))
        bounds = [len(members) * part // count for part in range(count + 1)]
        for start, stop in pairwise(bounds):
            common = (0, *shared[start + 1 : stop])
            tokens = sum(len(read[i]) - c for i, c in zip(members[start:stop], common, strict=True))
            if tokens <= longest_tree:
                rows.append(Row(tuple(members[start:stop]), common, tokens))
            else:
                rows += map(alone, members[start:stop])
    return sorted(rows, key=lambda row: (row.is_tree, row.tokens))


def _common_prefix(left: TokenIds, right: TokenIds) -> int:
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


def micro_batches(
    samples: Sequence[TrainingSample],
    rows: Sequence[Row],
    *,
    max_tokens: int,
    device: torch.device,
    planar_positions: PlanarPositions | None = None,
) -> Iterator[MicroBatch]:
    """Yields tensors of consecutive rows with at most ``max_tokens`` positions, including padding.

    Rows above 1024 tokens count more, because attention grows with the square of the length. A row above the limit
    forms its own micro-batch.

    Args:
        samples: Samples of one pass.
        rows: Layout of the samples.
        max_tokens: Maximum number of positions.
        device: Device of the tensors.
        planar_positions: Positions of a sample, for models with planar positions in images.
    """
    start = 0
    while start < len(rows):
        stop, longest = start, 0
        while stop < len(rows) and rows[stop].is_tree == rows[start].is_tree:
            longest = max(longest, rows[stop].tokens)
            cost = (stop + 1 - start) * longest * max(1, longest // QUADRATIC_FROM_TOKENS)
            if cost > max_tokens and stop > start:
                break
            stop += 1
        yield _lay_out(samples, rows[start:stop], device, planar_positions)
        start = stop


def _lay_out(
    samples: Sequence[TrainingSample],
    rows: Sequence[Row],
    device: torch.device,
    planar_positions: PlanarPositions | None,
) -> MicroBatch:
    is_tree, width = rows[0].is_tree, max(row.tokens for row in rows)
    ids = np.zeros((len(rows), width), np.int64)
    has_media = any(samples[index].media for row in rows for index in row.samples)
    planes = planar_positions if has_media else None
    positions = np.zeros((1 if planes is None else 3, len(rows), width), np.int64)
    media: list[Placement] = []
    visible = np.zeros((len(rows), width, width) if is_tree else (0, 0, 0), np.bool_)
    past = np.tri(width, dtype=np.bool_)
    sources: list[npt.NDArray[np.int64]] = []
    for number, row in enumerate(rows):
        path = np.empty(0, np.int64)  # Columns of the current sample's tokens.
        column = 0
        for index, shared in zip(row.samples, row.shared, strict=True):
            sample = samples[index]
            new = len(sample.token_ids) - 1 - shared
            end = column + new
            ids[number, column:end] = sample.token_ids[shared:-1]
            plane = np.arange(len(sample.token_ids))[None] if planes is None else planes(sample)
            positions[:, number, column:end] = plane[:, shared : shared + new]
            start = number * width + column - shared
            media.extend((start + piece.start, piece) for piece in sample.media if piece.start >= shared)
            if is_tree and new:
                if shared:
                    visible[number, column:end] = visible[number, path[shared - 1]]
                visible[number, column:end, column:end] = past[:new, :new]
            path = np.concatenate([path[:shared], np.arange(column, end)])
            sources.extend(path[start - 1 : stop - 1] + number * width for start, stop in sample.turn_spans)
            column = end
    order = [index for row in rows for index in row.samples]
    chosen = [samples[index] for index in order]
    nodes, node_of_token = np.unique(np.concatenate(sources), return_inverse=True)
    targets = np.concatenate([sample.token_ids[a:b] for sample in chosen for a, b in sample.turn_spans])

    def tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    def joined(arrays: list[Floats | None]) -> torch.Tensor | None:
        known = [array for array in arrays if array is not None]
        return tensor(np.concatenate(known)) if len(known) == len(arrays) else None

    return MicroBatch(
        token_ids=tensor(ids),
        positions=tensor(positions) if planes is not None else tensor(positions[0]) if is_tree else None,
        visible=tensor(visible).unsqueeze(1) if is_tree else None,
        nodes=tensor(nodes),
        node_of_token=tensor(node_of_token),
        targets=tensor(targets.astype(np.int64)),
        rollout_logprobs=tensor(np.concatenate([_rollout_logprobs(sample) for sample in chosen])),
        proximal_logprobs=joined([sample.proximal_logprobs for sample in chosen]),
        proximal_fractions=joined([_per_token(sample) for sample in chosen]),
        reference_logprobs=joined([sample.reference_logprobs for sample in chosen]),
        advantages=tensor(np.concatenate([sample.advantages for sample in chosen])),
        media=media,
        samples=order,
        sample_tokens=[len(sample.advantages) for sample in chosen],
    )


def _per_token(sample: TrainingSample) -> Floats | None:
    """Returns the proximal fraction of each token's turn, ``(sampled_tokens,)``."""
    if sample.proximal_fractions is None:
        return None
    return np.repeat(sample.proximal_fractions, [stop - start for start, stop in sample.turn_spans])


def _rollout_logprobs(sample: TrainingSample) -> Floats:
    return np.full(sample.sampled_tokens, np.nan, np.float32) if sample.logprobs is None else sample.logprobs
