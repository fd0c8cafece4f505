"""Conversion of training samples to the tensors that verl's workers accept.

A sample is one row: its first prompt on the left, everything after it on the right, each padded to the longest. Only
masks mark the tokens that count, never the padding token: ``response_mask`` is 1 on sampled tokens, and 0 on padding
and on tokens that the environment added between turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rllm_core.errors import RunError
from rllm_core.types import Floats, TrainingSample
from rllm_verl import verl_api

if TYPE_CHECKING:
    import torch

OLD_LOGPROBS = "old_log_probs"  # verl's name for the denominator of ratios
PADDING_ID = 0  # any id works, because masks exclude it
FILLING_TOKENS = 2  # a filler row has one prompt and one response token, because verl requires both


@dataclass(frozen=True)
class VerlBatch:
    """One pass; its rows are laid out once the whole step is known.

    Attributes:
        samples: Training samples of the pass.
    """

    samples: Sequence[TrainingSample]


@dataclass(frozen=True)
class Rows:
    """Samples laid out as rows, with filler rows where the number of rows must be divisible.

    Attributes:
        samples: Training samples, in the given order.
        row_of_sample: ``(samples,)`` row index of each sample.
        tensors: Arrays ``(rows, ...)``, under verl's names.
        mini_batches: Number of mini-batches, each with a sample.
    """

    samples: Sequence[TrainingSample]
    row_of_sample: npt.NDArray[np.int64]
    tensors: dict[str, npt.NDArray[Any]]
    mini_batches: int

    @property
    def tokens(self) -> list[int]:
        """``(rows,)`` number of tokens that are not padding."""
        return [int(count) for count in self.tensors["attention_mask"].sum(1)]

    def to_verl(self, settings: Mapping[str, Any]) -> Any:
        """Returns a TensorDict without padding, as workers accept it, with ``settings`` for all rows."""
        import torch

        tensors = {name: torch.from_numpy(array) for name, array in self.tensors.items()}
        padded = verl_api.use("DataProto").from_dict(tensors=tensors).to_tensordict()
        data = verl_api.use("left_right_2_no_padding")(padded)
        verl_api.use("assign_non_tensor")(data, **settings)
        return data

    def sampled(self, values: torch.Tensor) -> list[Floats]:
        """Returns ``(sampled_tokens,)`` values of each sample's tokens, from ``(rows, response_tokens)`` values."""
        array, mask = values.float().numpy(), self.tensors["response_mask"].astype(bool)
        return [array[row][mask[row]] for row in self.row_of_sample]


def lay_out(samples: Sequence[TrainingSample], *, ranks: int, mini_batches: int, max_tokens: int) -> Rows:
    """Lays out ``samples`` as rows.

    Args:
        samples: Training samples, at least one.
        ranks: Number of trainers with different rows; each gets equally many rows, and about equally many tokens.
        mini_batches: Number of mini-batches, into which each rank's rows are split equally; with few samples, fewer.
        max_tokens: Maximum tokens in one row.

    Raises:
        RunError: If a sample is longer than ``max_tokens``.
    """
    tokens = [_end(sample) for sample in samples]
    longest = max(tokens)
    if longest > max_tokens:
        raise RunError(
            f"a training sample has {longest} tokens, and verl.max_tokens_per_device = {max_tokens} is the limit of "
            "one device: raise it, or lower rollout.max_response_tokens"
        )
    mini_batches = min(mini_batches, -(-len(samples) // ranks))
    count = -(-len(samples) // (ranks * mini_batches)) * ranks * mini_batches
    order = _balanced(tokens + [FILLING_TOKENS] * (count - len(samples)), ranks)
    order = np.concatenate([_spread(part, len(samples), mini_batches) for part in np.split(order, ranks)])
    row_of_sample = np.argsort(order)[: len(samples)]
    prompts = max(sample.prompt_tokens for sample in samples)
    responses = max(1, *(end - sample.prompt_tokens for end, sample in zip(tokens, samples, strict=True)))
    rows = _Arrays(count, prompts, responses)
    for sample, row in zip(samples, row_of_sample, strict=True):
        rows.fill(row, sample)
    for row in np.sort(order.argsort()[len(samples) :]):
        rows.fill_up(row)
    return Rows(samples, row_of_sample, rows.named(samples), mini_batches)


def _balanced(tokens: list[int], ranks: int) -> npt.NDArray[np.int64]:
    """Returns the ``(rows,)`` order in which equal consecutive parts have about equally many tokens."""
    if ranks == 1:
        return np.arange(len(tokens))
    parts = verl_api.use("get_seqlen_balanced_partitions")(tokens, k_partitions=ranks, equal_size=True)
    return np.concatenate([np.sort(np.array(part, np.int64)) for part in parts])


def _spread(part: npt.NDArray[np.int64], samples: int, mini_batches: int) -> npt.NDArray[np.int64]:
    """Returns one rank's rows with the filler rows spread over the mini-batches: one of fillers only has no mean."""
    size, fillers = len(part) // mini_batches, iter(part[part >= samples])
    chunks = np.array_split(part[part < samples], mini_batches)
    return np.concatenate([[*chunk, *islice(fillers, size - len(chunk))] for chunk in chunks]).astype(np.int64)


class _Arrays:
    """Arrays of rows, empty at first."""

    def __init__(self, rows: int, prompt_tokens: int, response_tokens: int) -> None:
        self.prompts = np.full((rows, prompt_tokens), PADDING_ID, np.int64)
        self.responses = np.full((rows, response_tokens), PADDING_ID, np.int64)
        self.prompt_mask = np.zeros((rows, prompt_tokens), np.int64)
        self.written = np.zeros((rows, response_tokens), np.int64)
        self.sampled = np.zeros((rows, response_tokens), np.int64)
        self._values: dict[str, npt.NDArray[np.float32]] = {}

    def fill(self, row: int, sample: TrainingSample) -> None:
        """Writes one sample into a row."""
        start, end = sample.prompt_tokens, _end(sample)
        ids, count = sample.token_ids[:end], end - start
        self.prompts[row, -start:] = ids[:start]
        self.prompt_mask[row, -start:] = 1
        self.responses[row, :count] = ids[start:]
        self.written[row, :count] = 1
        self.sampled[row, :count] = sample.loss_mask[start:end]
        self._spread(row, "advantages", sample.advantages)
        self._spread(row, "rollout_log_probs", sample.logprobs)
        self._spread(row, OLD_LOGPROBS, _old_logprobs(sample))
        self._spread(row, "ref_log_prob", sample.reference_logprobs)

    def fill_up(self, row: int) -> None:
        """Writes a filler row, without sampled tokens."""
        self.prompt_mask[row, -1] = 1
        self.written[row, 0] = 1

    def _spread(self, row: int, name: str, values: Floats | None) -> None:
        if values is not None:
            array = self._values.setdefault(name, np.zeros(self.sampled.shape, np.float32))
            array[row, self.sampled[row].astype(bool)] = values

    def named(self, samples: Sequence[TrainingSample]) -> dict[str, npt.NDArray[Any]]:
        """Returns the arrays under verl's names; leaves out values that some samples lack."""
        attention = np.concatenate([self.prompt_mask, self.written], 1)
        arrays: dict[str, npt.NDArray[Any]] = {
            "prompts": self.prompts,
            "responses": self.responses,
            "input_ids": np.concatenate([self.prompts, self.responses], 1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clip(min=0),
            "response_mask": self.sampled,
        }
        known = {
            "advantages": True,
            "rollout_log_probs": all(sample.logprobs is not None for sample in samples),
            OLD_LOGPROBS: all(_old_logprobs(sample) is not None for sample in samples),
            "ref_log_prob": all(sample.reference_logprobs is not None for sample in samples),
        }
        return arrays | {name: values for name, values in self._values.items() if known[name]}


def _end(sample: TrainingSample) -> int:
    """Returns the end of the last sampled token; later tokens do not affect any log-probability."""
    return sample.turn_spans[-1][1] if sample.turn_spans else len(sample.token_ids)


def _old_logprobs(sample: TrainingSample) -> Floats | None:
    """Returns ``(sampled_tokens,)`` old log-probabilities: the proximal policy's, else the sampling policy's."""
    return sample.logprobs if sample.proximal_logprobs is None else sample.proximal_logprobs
