"""The sampler: turns a batch of prompts into completions, from prefill to the last token.

A row of the batch is a prefix, not a completion: completions of one prompt are decoded once as long as they agree. A
row branches when its completions sample different tokens, and is dropped when all of them have finished.

A token's randomness depends only on its request's seed and its position (a counter, no generator). Inverting the
cumulative distribution turns it into a token. The rest of the batch can change a sample only where rounding moves a
probability across the drawn number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rllm_core.types import FinishReason, SamplingParams, TokenIds, TokenOutput
from rllm_local.decoders import Decoder
from rllm_local.drawing import Rows
from rllm_local.vision import Placement

UNIFORM_BITS = 48  # Few enough that uniform * total < total in float64.
BLOCK_POSITIONS = 32
COMPACT_BELOW = 0.75
SCORED_POSITIONS = 4096
SCORED_LOGITS = 2**26  # Numbers in float32: 256 MiB.


@dataclass(frozen=True)
class Request:
    """A prompt, and one completion to sample per seed.

    Attributes:
        prompt_ids: ``(tokens,)``; ids at the positions of images are ignored.
        media: Images of the prompt, with their start positions.
    """

    prompt_ids: TokenIds
    params: SamplingParams
    seeds: Sequence[int]
    media: Sequence[Placement] = ()


@dataclass(frozen=True)
class ScoreRequest:
    """A request for the log-probabilities of given tokens.

    Attributes:
        token_ids: ``(tokens,)``.
        start: Position of the first token to score, at least 1.
    """

    token_ids: TokenIds
    start: int

    @property
    def count(self) -> int:
        """Number of tokens to score."""
        return len(self.token_ids) - self.start


class Unwanted(Exception):
    """Raised if no caller waits for this batch any more."""


@torch.inference_mode()
def generate(
    decoder: Decoder,
    requests: Sequence[Request],
    device: torch.device,
    *,
    weight_version: int = 0,
    is_unwanted: Callable[[], bool] = lambda: False,
    tokens_ahead: int = 1,
) -> list[list[TokenOutput]]:
    """Samples all completions of all requests in one batch.

    Completions of one request share a row of the batch until they differ.

    Args:
        decoder: Forward pass.
        requests: Requests to sample.
        device: Device of the decoder.
        weight_version: Version of the decoder's weights.
        is_unwanted: Returns whether to stop; called before every token, or before every ``tokens_ahead``.
        tokens_ahead: Tokens to sample between copies to the host, which show where completions end or branch. Once
            every completion has its own row, more than one only wastes the tokens computed after an end.

    Returns:
        Per request, one completion per seed; their arrays are read-only.

    Raises:
        Unwanted: If ``is_unwanted`` returned True.
    """
    counts = [len(request.seeds) for request in requests]
    of_request = np.repeat(np.arange(len(requests)), counts)
    seeds = np.array([seed for request in requests for seed in request.seeds], np.uint64)
    limits = np.array([request.params.max_response_tokens for request in requests])[of_request]
    stop_ids = _stop_ids(requests)[of_request]

    logits = decoder.prefill(*_left_padded([request.prompt_ids for request in requests], device), _placed(requests))
    rows = Rows([request.params for request in requests], device)
    places = _Places(of_request)
    tokens = np.zeros((len(seeds), BLOCK_POSITIONS), np.int32)
    logprobs = np.zeros((len(seeds), BLOCK_POSITIONS), np.float32)
    lengths = limits.copy()
    stopped = np.zeros(len(seeds), np.bool_)
    block = np.empty((0, 0))
    position, ahead, soonest = 0, 1, limits.min()
    while True:
        if is_unwanted():
            raise Unwanted(f"stopped after {position} tokens")
        column = position % BLOCK_POSITIONS
        if column == 0:
            block = uniforms(seeds, position, BLOCK_POSITIONS)
            if position == tokens.shape[1]:
                tokens = np.pad(tokens, ((0, 0), (0, len(tokens[0]))))
                logprobs = np.pad(logprobs, ((0, 0), (0, len(logprobs[0]))))
        alive, batch_rows = places.alive, len(logits)
        at: Any = (slice(None), places.row_of, places.slot_of)
        if places.slots == 1 and tokens_ahead > 1:
            ahead = min(tokens_ahead, BLOCK_POSITIONS - column, int(limits[alive].max()) - position)
        drawn = block[alive, column : column + ahead].T
        if places.slots == 1 and len(alive) == batch_rows:
            drawn, at = drawn[:, :, None], (slice(None), slice(None), 0)
        else:
            drawn, of_alive = np.zeros((ahead, batch_rows, places.slots)), drawn
            drawn[at] = of_alive
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for uniform in torch.from_numpy(drawn).to(device):
            if found:
                logits = decoder.step(found[-1][0][:, 0])
            found.append(rows.sample(logits, uniform))
            del logits  # before the next ones need their memory
        sampled, its_logprobs = (torch.stack(part).cpu().numpy()[at] for part in zip(*found, strict=True))
        tokens[alive, position : position + ahead] = sampled.T
        logprobs[alive, position : position + ahead] = its_logprobs.T
        position += ahead
        chosen, stops = sampled[-1], sampled[:, :, None] == stop_ids[alive]
        if position >= soonest or stops.any():
            stops = stops.any(2)
            ends = position - ahead + 1 + stops.argmax(0)  # of completions that have stopped
            has_stopped = stops.any(0) & (ends <= limits[alive])
            running = ~has_stopped & (limits[alive] > position)
            lengths[alive[has_stopped]] = ends[has_stopped]
            stopped[alive[has_stopped]] = True
            if not running.any():
                break
            places.keep(running)
            chosen, soonest = chosen[running], limits[places.alive].min()
        parents, read = places.advance(chosen, batch_rows)
        if parents is not None:
            index = torch.from_numpy(parents).to(device)
            decoder.select(index)
            rows.select(index)
        logits = decoder.step(torch.from_numpy(read).to(device))

    tokens.flags.writeable = logprobs.flags.writeable = False
    # Validating every record would cost a third of a small model's sampling time, and shapes agree here.
    completions = [
        TokenOutput.model_construct(
            token_ids=tokens[row, :length],
            logprobs=logprobs[row, :length],
            finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
            weight_version=weight_version,
        )
        for row, (length, is_stopped) in enumerate(zip(lengths.tolist(), stopped.tolist(), strict=True))
    ]
    bounds = np.cumsum(counts).tolist()
    return [completions[end - count : end] for end, count in zip(bounds, counts, strict=True)]


@torch.inference_mode()
def score(
    decoder: Decoder,
    scorings: Sequence[ScoreRequest],
    device: torch.device,
    *,
    vocabulary_size: int,
    is_unwanted: Callable[[], bool] = lambda: False,
) -> list[npt.NDArray[np.float32]]:
    """Returns log-probabilities of given tokens at temperature 1, in passes over sequences of similar length.

    Args:
        decoder: Forward pass.
        scorings: Requests, each with at least one token.
        device: Device of the decoder.
        vocabulary_size: Width of the logits; limits the sequences per pass.
        is_unwanted: Returns whether to stop; called before every pass.

    Returns:
        Log-probabilities per request, ``(count,)``.

    Raises:
        Unwanted: If ``is_unwanted`` returned True.
    """
    result: list[npt.NDArray[np.float32]] = [np.empty(0, np.float32)] * len(scorings)
    order = sorted(range(len(scorings)), key=lambda index: len(scorings[index].token_ids))
    while order:
        if is_unwanted():
            raise Unwanted(f"stopped with {len(order)} sequences left")
        rows, longest, most = 0, 0, 0
        for index in order:
            longest, most = len(scorings[index].token_ids), max(most, scorings[index].count)
            too_long = (rows + 1) * longest > SCORED_POSITIONS
            if rows and (too_long or (rows + 1) * most * vocabulary_size > SCORED_LOGITS):
                break
            rows += 1
        part, order = order[:rows], order[rows:]
        chosen = [scorings[index] for index in part]
        count = max(scoring.count for scoring in chosen)
        logits = decoder.logits(*_left_padded([scoring.token_ids[:-1] for scoring in chosen], device), count)
        targets, _ = _left_padded([scoring.token_ids[scoring.start :] for scoring in chosen], device)
        logprobs = torch.log_softmax(logits, -1).gather(2, targets[:, :, None])[:, :, 0].cpu().numpy()
        for index, scoring, row in zip(part, chosen, logprobs, strict=True):
            result[index] = row[count - scoring.count :].copy()
    return result


class _Places:
    """Positions of the unfinished completions in the batch.

    Attributes:
        alive: Indices of the unfinished completions, ``(alive,)``.
        row_of: Row of each completion, ascending, ``(alive,)``.
        slot_of: Index of each completion within its row, ``(alive,)``.
        slots: Largest number of completions in one row.
    """

    def __init__(self, row_of: npt.NDArray[np.intp]) -> None:
        self.alive = np.arange(len(row_of))
        self._place(row_of)

    def _place(self, row_of: npt.NDArray[np.intp]) -> None:
        numbers = np.arange(len(row_of))
        self.row_of = row_of
        self.slot_of = numbers - np.maximum.accumulate(np.where(_begins(row_of), numbers, 0))
        self.slots = int(self.slot_of.max()) + 1

    def keep(self, running: npt.NDArray[np.bool_]) -> None:
        """Drops all other completions; the rows of the batch stay."""
        self.alive, self.row_of, self.slot_of = self.alive[running], self.row_of[running], self.slot_of[running]

    def advance(
        self, chosen: npt.NDArray[np.int64], rows: int
    ) -> tuple[npt.NDArray[np.intp] | None, npt.NDArray[np.int64]]:
        """Advances to the prefixes that end in the chosen tokens, ``(alive,)``.

        Returns:
            Indices of the rows to continue, or None to keep the batch unchanged; and the next token to read per row.
        """
        if len(chosen) == rows and self.slots == 1:
            return None, chosen
        parents, next_of, read = self.row_of, np.arange(len(chosen)), chosen
        if self.slots > 1:
            order = np.lexsort((chosen, self.row_of))
            self.alive, ordered, chosen = self.alive[order], self.row_of[order], chosen[order]
            begins = _begins(ordered, chosen)
            parents, next_of, read = ordered[begins], begins.cumsum() - 1, chosen[begins]
            self._place(next_of)
        if len(parents) <= COMPACT_BELOW * rows or not _begins(parents).all():
            self.row_of = next_of
            return parents, read
        self.row_of = parents[next_of]
        read_by_all = np.zeros(rows, np.int64)  # Rows with finished completions may read any token.
        read_by_all[parents] = read
        return None, read_by_all


def _begins(*columns: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Returns a mask of the entries that differ from the previous one in any column."""
    begins = np.ones(len(columns[0]), np.bool_)
    begins[1:] = np.any([column[1:] != column[:-1] for column in columns], 0)
    return begins


def uniforms(seeds: npt.NDArray[np.uint64], start: int, count: int) -> npt.NDArray[np.float64]:
    """Returns uniform numbers in [0, 1) for ``count`` positions from ``start`` on, ``(seeds, count)``.

    SplitMix64 (Steele, Lea, Flood 2014): the finalizer of a counter that starts at the finalized seed.
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


def _placed(requests: Sequence[Request]) -> list[Placement]:
    """Returns the images of a left-padded batch, with flat positions."""
    longest = max(len(request.prompt_ids) for request in requests)
    return [
        ((row + 1) * longest - len(request.prompt_ids) + start, chunk)
        for row, request in enumerate(requests)
        for start, chunk in request.media
    ]


def _stop_ids(requests: Sequence[Request]) -> npt.NDArray[np.int64]:
    """Returns the stop tokens of each request, ``(requests, most)``, padded with -1."""
    most = max(len(request.params.stop_token_ids) for request in requests)
    ids = np.full((len(requests), most), -1)
    for row, request in enumerate(requests):
        ids[row, : len(request.params.stop_token_ids)] = request.params.stop_token_ids
    return ids
