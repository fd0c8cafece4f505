"""The sampler: a batch of prompts to completions, from prefill to the last token.

The randomness of a token is a function of its request's seed and its position only (a counter, no generator), and
turns into a token by inverting the cumulative distribution. What else is in the batch can change a sample only where
rounding moves a probability across the drawn number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rllm_core.types import SamplingParams, TokenIds
from rllm_local.decoders import Decoder

UNIFORM_BITS = 48  # few enough that uniform * total < total holds in float64
BLOCK_POSITIONS = 32
COMPACT_BELOW = 0.75


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it, once per seed."""

    prompt_ids: TokenIds
    params: SamplingParams
    seeds: Sequence[int]


@dataclass(frozen=True)
class Completion:
    """What was sampled; the arrays are read-only.

    Attributes:
        token_ids: ``(tokens,)``, a sampled stop token included.
        logprobs: ``(tokens,)``.
        stopped: Whether a stop token was sampled.
    """

    token_ids: TokenIds
    logprobs: npt.NDArray[np.float32]
    stopped: bool


@torch.inference_mode()
def generate(decoder: Decoder, requests: Sequence[Request], device: torch.device) -> list[list[Completion]]:
    """Sample all completions of all requests in one batch.

    Returns:
        Per request one completion per seed.
    """
    counts = [len(request.seeds) for request in requests]
    params = [request.params for request in requests for _ in request.seeds]
    seeds = np.array([seed for request in requests for seed in request.seeds], np.uint64)
    rows = _Rows(params, device)

    prompts, padding = _left_padded([request.prompt_ids for request in requests], device)
    logits = decoder.prefill(prompts, padding)
    if max(counts) > 1:
        of_request = torch.repeat_interleave(torch.arange(len(requests)), torch.tensor(counts)).to(device)
        decoder.select(of_request)
        logits = logits[of_request]

    limit = int(rows.limits.max())
    alive = np.arange(len(seeds))  # which completion each row of the batch belongs to
    tokens = np.zeros((len(seeds), BLOCK_POSITIONS), np.int32)
    logprobs = np.zeros((len(seeds), BLOCK_POSITIONS), np.float32)
    lengths = rows.limits.copy()
    stopped = np.zeros(len(seeds), np.bool_)
    running = np.ones(len(seeds), np.bool_)  # per row of the batch: finished rows may stay in it for a while
    block = torch.empty(0)
    for position in range(limit):
        if position % BLOCK_POSITIONS == 0:
            drawn = uniforms(seeds[alive], position, BLOCK_POSITIONS)
            block = torch.from_numpy(drawn).to(device)
            if position == tokens.shape[1]:
                tokens = np.pad(tokens, ((0, 0), (0, len(tokens[0]))))
                logprobs = np.pad(logprobs, ((0, 0), (0, len(logprobs[0]))))
        sampled, its_logprobs = rows.sample(logits, block[:, position % BLOCK_POSITIONS])
        chosen = sampled.cpu().numpy()
        tokens[alive, position] = chosen
        logprobs[alive, position] = its_logprobs.cpu().numpy()
        stops = running & (chosen[:, None] == rows.stop_ids).any(1)
        if stops.any():
            lengths[alive[stops]] = position + 1
            stopped[alive[stops]] = True
        running &= ~stops & (rows.limits > position + 1)
        left = int(running.sum())
        if left == 0:
            break
        if left <= COMPACT_BELOW * len(running):
            kept = np.flatnonzero(running)
            index = torch.from_numpy(kept).to(device)
            decoder.select(index)
            rows.select(kept, index)
            sampled, block = sampled[index], block[index]
            alive, running = alive[kept], running[kept]
        logits = decoder.step(sampled)

    tokens.flags.writeable = logprobs.flags.writeable = False
    completions = [
        Completion(tokens[row, :length], logprobs[row, :length], bool(stopped[row]))
        for row, length in enumerate(lengths.tolist())
    ]
    ends = np.cumsum(counts).tolist()
    return [completions[end - count : end] for end, count in zip(ends, counts, strict=True)]


def uniforms(seeds: npt.NDArray[np.uint64], start: int, count: int) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) for positions ``start .. start + count`` of each seed, ``(seeds, count)``.

    SplitMix64 (Steele, Lea, Flood 2014): the finaliser of a counter that starts at the finalised seed.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    counters = np.arange(start + 1, start + count + 1, dtype=np.uint64) * golden
    mixed = _finalised(_finalised(seeds)[:, None] + counters)
    return (mixed >> np.uint64(64 - UNIFORM_BITS)).astype(np.float64) * 2.0**-UNIFORM_BITS


def _finalised(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _left_padded(prompts: Sequence[TokenIds], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = np.array([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    ids = np.zeros((len(prompts), longest), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
    return torch.from_numpy(ids).to(device), torch.from_numpy(longest - lengths).to(device)


class _Rows:
    """The sampling parameters of the rows of a batch, as arrays; what is neutral in all of them is left out."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        self.limits = np.array([p.max_response_tokens for p in params])
        most = max(len(p.stop_token_ids) for p in params)
        self.stop_ids = np.array([(*p.stop_token_ids, *[-1] * (most - len(p.stop_token_ids))) for p in params])
        self.stop_ids = self.stop_ids.reshape(len(params), most)

        def column(values: Sequence[float], neutral: float) -> torch.Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, device=device)[:, None]

        self.temperature = column([p.temperature or 1.0 for p in params], 1.0)
        self.greedy = column([float(p.temperature == 0) for p in params], 0.0)
        self.top_k = column([float(p.top_k or torch.inf) for p in params], torch.inf)
        self.top_p = column([p.top_p for p in params], 1.0)

    def select(self, kept: npt.NDArray[np.intp], index: torch.Tensor) -> None:
        """Keep only these rows."""
        self.limits, self.stop_ids = self.limits[kept], self.stop_ids[kept]
        for name in ("temperature", "greedy", "top_k", "top_p"):
            column = getattr(self, name)
            if column is not None:
                setattr(self, name, column[index])

    def sample(self, logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One token per row and its log-probability, both ``(rows,)``.

        Args:
            logits: ``(rows, vocabulary)``.
            uniform: ``(rows,)`` numbers in [0, 1), float64.
        """
        if self.temperature is not None:
            logits = logits / self.temperature
        logprobs = torch.log_softmax(logits, -1)
        probabilities = logprobs.exp()
        if self.top_k is not None or self.top_p is not None:
            probabilities = self._truncated(probabilities)
        cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        threshold = uniform[:, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, threshold, right=True)
        if self.greedy is not None:
            token = torch.where(self.greedy > 0, logits.argmax(-1, keepdim=True), token)
        return token.squeeze(1), logprobs.gather(1, token).squeeze(1)

    def _truncated(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Probabilities with zeros where top-k, then top-p, cuts."""
        ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            ranks = torch.arange(ranked.shape[1], device=ranked.device)
            ranked = ranked.masked_fill(ranks >= self.top_k, 0.0)
        if self.top_p is not None:
            before = ranked.cumsum(-1) - ranked
            ranked = ranked.masked_fill(before >= self.top_p * ranked.sum(-1, keepdim=True), 0.0)
        return torch.zeros_like(ranked).scatter(1, order, ranked)
