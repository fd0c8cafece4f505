"""Turns logits and uniform numbers into tokens: inverts the cumulative distribution, after top-k and top-p.

A small vocabulary takes the plain path: a cumulative sum of each row in float64, and a sort for top-k and top-p. With a
large vocabulary, both would take longer than the logits themselves, so:

* The sum has two levels. Sums of blocks decide on a block, and the numbers within it on a token. Only the first level
  is rounded to float32, so the token is another one than of an exact sum only where the drawn number is closer to the
  boundary between two tokens than ``BLOCK_ROUNDING`` of the sum of the row.
* Top-k and top-p look for the lowest weight that they keep, without sorting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from rllm_core.types import SamplingParams
from rllm_local.memory import LARGE_VOCABULARY

BLOCK_TOKENS = 512
BLOCK_ROUNDING = 1e-6
DIGITS = 2**16  # per half of a float32 number
TRUNCATED_LOGITS = 2**18  # at once; more would exceed the caches of a CPU
GPU_TRUNCATED_LOGITS = 2**25


class Rows:
    """Sampling parameters of the rows of a batch; parameters that are neutral in all rows are skipped."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        def column(values: Sequence[float], neutral: float) -> torch.Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, device=device)[:, None]

        self.temperature = column([p.temperature or 1.0 for p in params], 1.0)
        self.greedy = column([float(p.temperature == 0) for p in params], 0.0)
        self.top_k = column([float(p.top_k or torch.inf) for p in params], torch.inf)
        self._most_k = max(p.top_k for p in params)
        self.top_p = column([p.top_p for p in params], 1.0)

    def select(self, index: torch.Tensor) -> None:
        """See `Decoder`."""
        for name in ("temperature", "greedy", "top_k", "top_p"):
            column = getattr(self, name)
            if column is not None:
                setattr(self, name, column[index])

    def sample(self, logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples tokens and returns them with their log-probabilities, both ``(rows, slots)``.

        Args:
            logits: ``(rows, vocabulary)``; overwritten if the vocabulary is large.
            uniform: ``(rows, slots)`` numbers in [0, 1), float64.
        """
        if logits.shape[1] >= LARGE_VOCABULARY:
            return self._sample_in_blocks(logits, uniform)
        if self.temperature is not None:
            logits = logits / self.temperature
        probabilities = torch.softmax(logits, -1)
        kept = probabilities
        if self.top_k is not None or self.top_p is not None:
            kept = self._truncated(probabilities)
        cumulative = kept.cumsum(-1, dtype=torch.float64)
        token = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        if self.greedy is not None:
            token = torch.where(self.greedy > 0, logits.argmax(-1, keepdim=True), token)
        return token, probabilities.gather(1, token).log()

    def _truncated(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Sets probabilities outside top-k, then top-p, to zero."""
        ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            ranks = torch.arange(ranked.shape[1], device=ranked.device)
            ranked = ranked.masked_fill(ranks >= self.top_k, 0.0)
        if self.top_p is not None:
            before = ranked.cumsum(-1) - ranked
            ranked = ranked.masked_fill(before >= self.top_p * ranked.sum(-1, keepdim=True), 0.0)
        return torch.zeros_like(ranked).scatter(1, order, ranked)

    def _sample_in_blocks(self, logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples in the memory of the logits, which become weights: exponentials relative to the largest one."""
        if self.temperature is not None:
            logits.div_(self.temperature)
        if self.greedy is not None:
            likeliest = logits.argmax(-1, keepdim=True)
        weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
        sums = _block_sums(weights)
        total = sums.sum(-1, keepdim=True, dtype=torch.float64)
        if self.top_k is not None or self.top_p is not None:
            self._truncate(weights)
            sums = _block_sums(weights)
        token = _token_in_blocks(weights, sums, uniform)
        if self.greedy is not None:
            token = torch.where(self.greedy > 0, likeliest, token)
        return token, (weights.gather(1, token) / total).log().float()

    def _truncate(self, weights: torch.Tensor) -> None:
        """Sets weights outside top-k, then top-p, to zero in place."""
        most = GPU_TRUNCATED_LOGITS if weights.is_cuda else TRUNCATED_LOGITS
        at_once = max(1, most // weights.shape[1])
        for start in range(0, len(weights), at_once):
            part, rows = weights[start : start + at_once], slice(start, start + at_once)
            if self.top_k is not None:
                _keep_top_k(part, self.top_k[rows], self._most_k)
            if self.top_p is not None:
                _keep_top_p(part, self.top_p[rows].double())


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Returns the sum of every block of a row, where the last block may be shorter, ``(rows, blocks)``."""
    whole = weights.shape[1] // BLOCK_TOKENS * BLOCK_TOKENS
    sums = weights[:, :whole].view(len(weights), -1, BLOCK_TOKENS).sum(-1)
    if whole == weights.shape[1]:
        return sums
    return torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], 1)


def _token_in_blocks(weights: torch.Tensor, sums: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverts the cumulative distribution; returns tokens, ``(rows, slots)``."""
    cumulative = sums.cumsum(-1, dtype=torch.float64)
    drawn = uniform * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, drawn, right=True)
    share = (drawn - F.pad(cumulative, (1, 0)).gather(1, block)) / sums.gather(1, block)
    columns = block[:, :, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=weights.device)
    inside = columns < weights.shape[1]
    columns.clamp_(max=weights.shape[1] - 1)
    within = weights.gather(1, columns.flatten(1)).view(columns.shape) * inside
    reached = within.cumsum(-1, dtype=torch.float64)
    # A GPU does not add cumulative sums one number at a time, so the share may reach 1.
    place = torch.searchsorted(reached, (share[:, :, None] * reached[:, :, -1:]), right=True)[:, :, 0]
    last = torch.searchsorted(reached, reached[:, :, -1:].contiguous(), right=False)[:, :, 0]
    return columns.gather(2, torch.minimum(place, last)[:, :, None])[:, :, 0]


def _keep_top_k(weights: torch.Tensor, top_k: torch.Tensor, most_k: int) -> None:
    """Sets all weights except the ``top_k`` largest of each row, ``(rows, 1)``, to zero; infinity keeps all."""
    most = min(most_k, weights.shape[1])
    ranked = weights.topk(most, -1).values
    lowest = ranked.gather(1, top_k.clamp(max=most).long() - 1).masked_fill_(top_k >= weights.shape[1], 0.0)
    _drop(weights, lowest, top_k - (weights > lowest).sum(-1, keepdim=True))


def _keep_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> None:
    """Sets all weights but the largest ones to zero, as long as larger ones sum to less than ``top_p`` of their row.

    The bit patterns of non-negative float32 numbers have the same order as the numbers. Their first half selects a
    bucket, and the second half selects the lowest weight to keep.

    Args:
        weights: ``(rows, vocabulary)``, at least 0.
        top_p: ``(rows, 1)``, float64.
    """
    digits, exact = weights.view(torch.int32), weights.double()
    limit = torch.where(top_p < 1, top_p * exact.sum(-1, keepdim=True), torch.inf)
    high = digits >> 16
    bucket, above = _lowest_kept(high, exact, torch.zeros_like(limit), limit)
    rest, above = _lowest_kept(digits & (DIGITS - 1), exact.mul_(high == bucket), above, limit)
    lowest = (bucket * DIGITS + rest).int().view(torch.float32)
    _drop(weights, lowest, ((limit - above) / lowest).ceil())


def _drop(weights: torch.Tensor, lowest: torch.Tensor, count: torch.Tensor) -> None:
    """Sets weights to zero if they are below the lowest, or equal to it but not among the first ``count``."""
    is_lowest = weights == lowest
    is_late = is_lowest.cumsum(-1, dtype=torch.int32) > count
    weights.masked_fill_((weights < lowest).logical_or_(is_late.logical_and_(is_lowest)), 0.0)


def _lowest_kept(
    digits: torch.Tensor, measure: torch.Tensor, above: torch.Tensor, limit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the lowest digits with less than the limit above them, and the sum above them, both ``(rows, 1)``.

    Args:
        digits: ``(rows, vocabulary)``.
        measure: Numbers to sum, ``(rows, vocabulary)``.
        above: Sum above all of these digits, ``(rows, 1)``.
        limit: ``(rows, 1)``.
    """
    sums = torch.zeros(len(digits), DIGITS, dtype=torch.float64, device=digits.device)
    reached = above + sums.scatter_add_(1, digits.long(), measure).flip(1).cumsum(1).flip(1)
    beyond = torch.cat([reached[:, 1:], above], 1)
    lowest = (beyond >= limit).sum(1, keepdim=True)
    return lowest, beyond.gather(1, lowest)
