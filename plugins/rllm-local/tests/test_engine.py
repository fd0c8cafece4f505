"""The engine: batching, rejected requests, weight versions and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rllm_local import engine as engine_module
from rllm_local.engine import LocalEngine
from rllm_local.fused import FusedDecoder
from rllm_local.sampler import generate
from transformers import AutoModelForCausalLM

from rllm_core.engine import EngineError
from rllm_core.types import FinishReason, MediaChunk, SamplingParams

PARAMS = SamplingParams(max_response_tokens=5)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Records rows per request of every sampled batch."""
    seen: list[list[int]] = []

    def recording(decoder: Any, requests: Any, device: torch.device, **options: Any) -> Any:
        seen.append([len(request.seeds) for request in requests])
        return generate(decoder, requests, device, **options)

    monkeypatch.setattr(engine_module, "generate", recording)
    return seen


@pytest.fixture
def engine(model_folder: Path) -> Iterator[LocalEngine]:
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    with ThreadPoolExecutor(1) as executor:
        yield LocalEngine(
            FusedDecoder(model, torch.float32),
            None,
            executor,
            device=torch.device("cpu"),
            vocabulary_size=model.config.vocab_size,
            max_model_tokens=64,
            max_batch_rows=10,
        )


def prompt(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


async def test_a_batch_fits_in_the_cache(
    engine: LocalEngine, batches: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm_local.engine.CACHE_STEP_POSITIONS", 2)
    engine._max_cache_positions = 5 * 10 + 3  # five rows of 3 + 5 positions, with 2 free ones
    short, long = prompt(9, 10, 11), prompt(*range(9, 24))  # 8 and 20 positions
    await asyncio.gather(
        engine.get_token_outputs_from_token_input(short, sampling_params=PARAMS, seeds=range(7)),
        engine.get_token_outputs_from_token_input(long, sampling_params=PARAMS, seeds=[1]),
        engine.get_token_outputs_from_token_input(prompt(*range(60)[:50]), sampling_params=PARAMS, seeds=[1, 2]),
    )
    # The long prompt joins two rows only if three rows of its length fit; the longest one is sampled alone.
    assert batches == [[5], [2], [1], [1], [1]]


async def test_requests_of_one_tick_share_a_batch(engine: LocalEngine, batches: list[list[int]]) -> None:
    first, second, third = await asyncio.gather(
        engine.get_token_outputs_from_token_input(prompt(9, 10), sampling_params=PARAMS, seeds=[1, 2, 3]),
        engine.get_token_output_from_token_input([9, 10, 11], sampling_params=PARAMS, seed=4),
        engine.get_token_output_from_token_input(prompt(12), sampling_params=PARAMS, seed=1),
    )
    assert batches == [[3, 1, 1]]
    assert len(first) == 3
    for output in (*first, second, third):
        assert output.finish_reason is FinishReason.LENGTH
        assert output.logprobs is not None
        assert len(output.token_ids) == len(output.logprobs) == 5
        assert type(output).model_validate_json(output.to_json()) == output
        with pytest.raises(ValueError, match="read-only"):
            output.token_ids[0] = 1


async def test_requests_that_arrive_while_a_batch_runs_form_the_next(
    engine: LocalEngine, batches: list[list[int]]
) -> None:
    async def late() -> None:
        while not batches:
            await asyncio.sleep(0)
        await asyncio.gather(*(ask(seed) for seed in (5, 6, 7)))

    async def ask(seed: int) -> None:
        await engine.get_token_output_from_token_input(prompt(9, seed), sampling_params=PARAMS, seed=seed)

    await asyncio.gather(ask(1), late())
    assert batches[0] == [1]
    assert sum(map(sum, batches)) == 4


async def test_batches_are_bounded(engine: LocalEngine, batches: list[list[int]]) -> None:
    outputs, more = await asyncio.gather(
        engine.get_token_outputs_from_token_input(prompt(9), sampling_params=PARAMS, seeds=range(24)),
        engine.get_token_outputs_from_token_input(prompt(9, 8), sampling_params=PARAMS, seeds=range(6)),
    )
    assert (len(outputs), len(more)) == (24, 6)
    assert batches == [[10], [10], [4, 6]]
    alone = await engine.get_token_output_from_token_input(prompt(9), sampling_params=PARAMS, seed=17)
    assert alone.token_ids.tolist() == outputs[17].token_ids.tolist()


@pytest.mark.parametrize(
    ("token_input", "limit", "message"),
    [
        (prompt(), 5, "at least one prompt token"),
        (prompt(3, 5000), 5, "token id 5000 is outside"),
        (prompt(*range(60)), 5, "60 prompt tokens and up to 5 new ones do not fit the model's 64 positions"),
    ],
)
async def test_requests_that_cannot_be_answered(
    engine: LocalEngine, token_input: np.ndarray, limit: int, message: str
) -> None:
    params = SamplingParams(max_response_tokens=limit)
    with pytest.raises(EngineError, match=message):
        await engine.get_token_output_from_token_input(token_input, sampling_params=params, seed=0)
    fine = await engine.get_token_output_from_token_input(prompt(*range(59)), sampling_params=params, seed=0)
    assert len(fine.token_ids) == 5


async def test_media_is_refused_by_name(engine: LocalEngine) -> None:
    image = MediaChunk(sha256="0" * 64, kind="image", length_tokens=4)
    with pytest.raises(ValueError, match="engine 'local' takes text only"):
        await engine.get_token_output_from_token_input([1, image], sampling_params=PARAMS, seed=0)


async def test_a_failing_batch_fails_its_requests_and_not_the_engine(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **options: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "generate", broken)
        with pytest.raises(EngineError, match="RuntimeError: out of memory") as caught:
            await engine.get_token_output_from_token_input(prompt(9), sampling_params=PARAMS, seed=0)
        assert isinstance(caught.value.__cause__, RuntimeError)
    output = await engine.get_token_output_from_token_input(prompt(9), sampling_params=PARAMS, seed=0)
    assert len(output.token_ids) == 5


async def test_a_request_given_up_does_not_disturb_the_others(engine: LocalEngine) -> None:
    async def ask(seed: int) -> Any:
        return await engine.get_token_output_from_token_input(prompt(9), sampling_params=PARAMS, seed=seed)

    given_up, kept = asyncio.create_task(ask(1)), asyncio.create_task(ask(2))
    await asyncio.sleep(0)
    given_up.cancel()
    assert (await kept).token_ids.tolist() == (await ask(2)).token_ids.tolist()
    with pytest.raises(asyncio.CancelledError):
        await given_up


async def test_outputs_carry_the_version_that_sampled_them(engine: LocalEngine, model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    before = await engine.get_token_output_from_token_input(prompt(9, 10), sampling_params=PARAMS, seed=0)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.7)
    engine.load_weights(model, 3)
    after = await engine.get_token_output_from_token_input(prompt(9, 10), sampling_params=PARAMS, seed=0)
    assert (before.weight_version, after.weight_version) == (0, 3)
    assert not np.array_equal(before.logprobs, after.logprobs)
