"""The decoder with CUDA graphs, with the steps that it captures run one by one. ``tests/gpu`` has it with graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rllm_local.cache import Cache
from rllm_local.decoders import TransformersDecoder
from rllm_local.fused import FusedDecoder
from rllm_local.graph_decoder import GraphDecoder
from rllm_local.sampler import Request, generate
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rllm_core.types import SamplingParams, TokenOutput

VOCABULARY = 97
LOGPROB_ERROR = 1e-5
CPU = torch.device("cpu")


class Uncaptured(GraphDecoder):
    """Runs what a graph would replay; ``captures`` has the size of the cache at each capture."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.captures: list[int] = []
        super().__init__(*arguments, **options)

    def _captured(self) -> tuple[Callable[[], object], torch.Tensor]:
        self.captures.append(self._cache.positions)
        output = torch.empty(len(self._tokens), self._embedding.shape[1])
        return lambda: output.copy_(self._read_token()), output


@pytest.fixture(autouse=True)
def _free_positions_are_not_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(cache: Cache, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, float("nan"))

    monkeypatch.setattr(Cache, "_empty", filled)


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        max_position_embeddings=512,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def completions(decoder: FusedDecoder, prompt_tokens: tuple[int, ...]) -> list[TokenOutput]:
    """Samples completions that branch, end at different tokens, and outgrow the cache several times."""
    params = SamplingParams(max_response_tokens=120, stop_token_ids=(5,))
    prompts = np.random.default_rng(0).integers(6, VOCABULARY, (len(prompt_tokens), max(prompt_tokens)))
    requests = [
        Request(prompt[:tokens].astype(np.int32), params, range(8 * number, 8 * number + 8))
        for number, (prompt, tokens) in enumerate(zip(prompts, prompt_tokens, strict=True))
    ]
    found = [completion for part in generate(decoder, requests, CPU) for completion in part]
    decoder.release()
    return found


@pytest.mark.parametrize("prompt_tokens", [(7, 7, 7), (3, 20, 11)], ids=["equal", "padded"])
def test_captured_steps_give_the_same_completions(model: PreTrainedModel, prompt_tokens: tuple[int, ...]) -> None:
    decoder = Uncaptured(model, torch.float32)
    plain = completions(FusedDecoder(model, torch.float32), prompt_tokens)
    for _ in range(2):  # the second batch finds what the first has left in the cache
        for mine, theirs in zip(completions(decoder, prompt_tokens), plain, strict=True):
            assert mine.token_ids.tolist() == theirs.token_ids.tolist()
            assert np.abs(mine.logprobs - theirs.logprobs).max() < LOGPROB_ERROR
    assert len({len(completion.token_ids) for completion in plain}) > 5
    assert len(set(decoder.captures)) > 2


def test_new_weights_are_captured(model: PreTrainedModel) -> None:
    decoder = Uncaptured(model, torch.float32)
    before = completions(decoder, (4,))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    decoder.use(decoder.copied(model, decoder.weights))
    after = completions(decoder, (4,))
    expected = completions(FusedDecoder(model, torch.float32), (4,))
    assert [each.token_ids.tolist() for each in after] == [each.token_ids.tolist() for each in expected]
    assert [each.token_ids.tolist() for each in after] != [each.token_ids.tolist() for each in before]


def test_a_wrong_captured_step_is_found(model: PreTrainedModel) -> None:
    class Wrong(Uncaptured):
        def _read_token(self) -> torch.Tensor:
            return 1.01 * super()._read_token() + 0.01

    reference = TransformersDecoder(model, shared=True)
    with torch.inference_mode():
        assert Uncaptured(model, torch.float32).agrees_with(reference, VOCABULARY)
        assert not Wrong(model, torch.float32).agrees_with(reference, VOCABULARY)
