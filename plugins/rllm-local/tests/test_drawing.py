"""Sampling from large vocabularies: the same tokens, distributions and truncations as by exact sums and sorts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from allocations import Allocations
from rllm_local import drawing
from rllm_local.drawing import BLOCK_ROUNDING, BLOCK_TOKENS, Rows

from rllm_core.types import SamplingParams

CPU = torch.device("cpu")
SIZES = [16_384, 20_011, 3 * BLOCK_TOKENS + 16_384 + 1]  # in whole blocks, with a short one, with a block of one token


def logits_of(rows: int, size: int, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread


def uniforms_of(rows: int, slots: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(rows, slots, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def params_of(rows: int, **options: Any) -> list[SamplingParams]:
    return [SamplingParams(max_response_tokens=1, **options)] * rows


def plain(rows: Rows, logits: torch.Tensor, uniform: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(drawing, "LARGE_VOCABULARY", 10**9)
        return rows.sample(logits.clone(), uniform)


@pytest.mark.parametrize("spread", [0.0, 3.0, 30.0])
@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_those_of_an_exact_sum_but_at_boundaries(size: int, spread: float) -> None:
    logits, uniform = logits_of(8, size, spread), uniforms_of(8, 64)
    token, logprobs = Rows(params_of(8), CPU).sample(logits.clone(), uniform)
    exact = logits.double().softmax(-1)
    cumulative = exact.cumsum(-1)
    expected = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    assert (token == expected).float().mean() > 0.99
    # The drawn number lies between the bounds of the token that it gave, but for the rounding of sums of blocks.
    upper = cumulative.gather(1, token)
    assert (uniform < upper + BLOCK_ROUNDING).all()
    assert (uniform >= upper - exact.gather(1, token) - BLOCK_ROUNDING).all()
    assert (logprobs - exact.gather(1, token).log()).abs().max() < 1e-5


@pytest.mark.parametrize("drawn", [0.0, 1 - 2.0**-48])
@pytest.mark.parametrize("size", SIZES)
def test_the_ends_of_the_distribution_give_tokens_that_can_be_sampled(size: int, drawn: float) -> None:
    logits = torch.full((2, size), -torch.inf)
    logits[0, [5, 700, 701]] = logits[1, [size - 3, size - 2]] = 1.0
    token, logprobs = Rows(params_of(2), CPU).sample(logits, torch.full((2, 1), drawn, dtype=torch.float64))
    assert token.flatten().tolist() == ([701, size - 2] if drawn else [5, size - 3])
    assert torch.allclose(logprobs.exp().flatten(), torch.tensor([1 / 3, 1 / 2]))


@pytest.mark.slow
def test_tokens_have_the_frequencies_of_their_probabilities() -> None:
    """Of numbers at equal distances, every token and those before it get a share that is exact to one number."""
    size, draws = 20_011, 50_000
    logits = logits_of(1, size)
    probabilities = logits.double().softmax(-1)[0].numpy()
    numbers = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    token, _ = Rows(params_of(1), CPU).sample(logits, numbers[None])
    found = np.bincount(token[0].numpy(), minlength=size).cumsum()
    assert np.abs(found - draws * probabilities.cumsum()).max() < 1


def kept_by_sorting(weights: torch.Tensor, top_k: float, top_p: float) -> torch.Tensor:
    """Returns which weights are kept, by a stable sort and sums in float64."""
    ranked, order = weights.double().sort(dim=-1, descending=True, stable=True)
    ranked = ranked.masked_fill(torch.arange(ranked.shape[1]) >= top_k, 0.0)
    if top_p < 1:
        before = ranked.cumsum(-1) - ranked
        limit = torch.tensor(top_p).double() * ranked.sum(-1, keepdim=True)
        ranked = ranked.masked_fill(before >= limit, 0.0)
    return torch.zeros_like(ranked).scatter(1, order, ranked) > 0


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1.0), (50, 1.0), (5000, 1.0), (0, 0.9), (0, 0.05), (0, 1e-6), (40, 0.8), (30_000, 0.999)]
)
def test_truncation_keeps_what_a_sort_keeps(
    top_k: int, top_p: float, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "TRUNCATED_LOGITS", 2 * 20_011)  # two rows at once
    # Rounded logits give many equal weights, of which the first ones are kept.
    logits = (logits_of(5, 20_011, spread) * 8).round() / 8
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    expected = kept_by_sorting(weights, top_k or torch.inf, top_p)
    Rows(params_of(5, top_k=top_k, top_p=top_p), CPU)._truncate(weights)
    different = (weights > 0) != expected
    if top_p == 1:
        assert not different.any()
    # Sums in another order may move the boundary of top-p by one of several equal weights.
    assert different.sum(1).max() <= 1
    assert expected.any(-1).all()


def test_rows_have_their_own_truncation(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [{"top_k": 3}, {}, {"top_p": 0.5}, {"temperature": 0.0}, {"temperature": 0.4, "top_k": 9, "top_p": 0.7}]
    params = [SamplingParams(max_response_tokens=1, **each) for each in options]  # type: ignore[arg-type]
    logits, uniform = logits_of(5, 20_011), uniforms_of(5, 40)
    rows = Rows(params, CPU)
    expected, its_logprobs = plain(rows, logits, uniform, monkeypatch)
    token, logprobs = rows.sample(logits.clone(), uniform)
    assert (token == expected).float().mean() > 0.99
    same = token == expected
    assert (logprobs - its_logprobs)[same].abs().max() < 2e-5  # mostly the rounding of torch's softmax
    assert (token[3] == logits[3].argmax()).all()
    assert len(token[0].unique()) == 3


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}])
def test_no_second_row_of_the_vocabulary_is_needed(options: dict[str, float]) -> None:
    rows, size = 16, 40_009
    logits, uniform = logits_of(rows, size), uniforms_of(rows, 1)
    live = Allocations(lambda _: "all")
    live.ignore([logits, uniform])
    with live:
        Rows(params_of(rows, **options), CPU).sample(logits, uniform)
    assert live.peak_bytes["all"] < 0.1 * logits.numel() * 4 + rows * BLOCK_TOKENS * 100


@pytest.mark.slow
def test_a_number_right_below_a_boundary_gives_a_token_before_it() -> None:
    logits = logits_of(2000, 16_384, 1.0)
    logits[:, :BLOCK_TOKENS] += 5.0  # so that the rounding of the sum of the row is that of the block
    logits[:, BLOCK_TOKENS - 9 : BLOCK_TOKENS] = -torch.inf  # so that the last token of the block cannot be sampled
    cumulative = drawing._block_sums((logits - logits.amax(-1, keepdim=True)).exp()).cumsum(-1, dtype=torch.float64)
    uniform = cumulative[:, :1] / cumulative[:, -1:]
    while (uniform * cumulative[:, -1:] >= cumulative[:, :1]).any():
        below = torch.nextafter(uniform, torch.zeros_like(uniform))
        uniform = torch.where(uniform * cumulative[:, -1:] >= cumulative[:, :1], below, uniform)
    token, _ = Rows(params_of(2000), CPU).sample(logits, uniform)
    assert (token == BLOCK_TOKENS - 10).all()
