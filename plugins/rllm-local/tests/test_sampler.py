"""Sampling: randomness from seed and position only, truncation, stop tokens, and mixed batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rllm_local import cache
from rllm_local.decoders import Decoder, TransformersDecoder
from rllm_local.fused import FusedDecoder
from rllm_local.sampler import COMPACT_BELOW, Request, generate, uniforms
from rllm_local.vision import Placement
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rllm_core.types import FinishReason, SamplingParams, TokenOutput

CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 24},
    "qwen2": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "gpt_neox": {},
}


def tiny_model(family: str) -> PreTrainedModel:
    options = FAMILIES[family]
    config = AutoConfig.for_model(
        "llama" if family == "llama3-rope" else family,
        vocab_size=97,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        **({} if family == "gpt_neox" else {"num_key_value_heads": 2}),
        max_position_embeddings=512,
        initializer_range=0.15,
        **options,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # Ones and zeros would hide a missing gain or bias.
                torch.nn.init.normal_(parameter, 1.0 if "norm" in name and "weight" in name else 0.0, 0.2)
    return model


@pytest.fixture(scope="module")
def decoder(model_folder: Path) -> Decoder:
    return FusedDecoder(AutoModelForCausalLM.from_pretrained(model_folder).eval(), torch.float32)


def requests(*, seeds: int = 3, **params: Any) -> list[Request]:
    rng = np.random.default_rng(0)
    options = SamplingParams(**{"max_response_tokens": 12, **params})
    return [
        Request(rng.integers(10, 250, length).astype(np.int32), options, [100 * length + s for s in range(seeds)])
        for length in (3, 17, 9)
    ]


def flat(results: list[list[TokenOutput]]) -> list[TokenOutput]:
    return [completion for part in results for completion in part]


def recomputed(model: PreTrainedModel, prompt: np.ndarray, completion: TokenOutput, temperature: float) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None]).squeeze(1).numpy()


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_recomputed_ones(family: str, temperature: float) -> None:
    model = tiny_model(family)
    plain = TransformersDecoder(model, shared=True)
    decoders: list[Decoder] = [plain]
    if FusedDecoder.supports(model):
        fused = FusedDecoder(model, torch.float32)
        with torch.inference_mode():
            assert fused.agrees_with(plain, 97)
        decoders.append(fused)
    assert (len(decoders) == 2) == (family not in ("gemma2", "gpt_neox"))
    batch = [
        Request(r.prompt_ids % 97, r.params, r.seeds)
        for r in requests(temperature=temperature, max_response_tokens=40, stop_token_ids=(3,))
    ]
    sampled = []
    for decoder in decoders:
        results = generate(decoder, batch, CPU)
        for request, completions in zip(batch, results, strict=True):
            for completion in completions:
                expected = recomputed(model, request.prompt_ids, completion, temperature)
                assert np.abs(completion.logprobs - expected).max() < 1e-5
        sampled.append([c.token_ids.tolist() for c in flat(results)])
    # Two forward passes round differently, and occasionally a drawn number lies between their results.
    same = sum(a == b for a, b in zip(sampled[0], sampled[-1], strict=True))
    assert same >= len(sampled[0]) - 2


def test_the_self_check_finds_a_wrong_weight() -> None:
    model = tiny_model("qwen3")
    fused, plain = FusedDecoder(model, torch.float32), TransformersDecoder(model, shared=True)
    with torch.inference_mode():
        model.get_decoder().layers[1].self_attn.k_norm.weight[3] += 0.1
        assert not fused.agrees_with(plain, 97)
        fused.use(fused.copied(model))
        assert fused.agrees_with(plain, 97)


def test_a_decoder_of_its_own_keeps_the_old_weights() -> None:
    model = tiny_model("gpt_neox")
    own, prompt = TransformersDecoder(model, shared=False), torch.arange(4)[None]
    none = torch.zeros(1, dtype=torch.long)
    with torch.inference_mode():
        before = own.prefill(prompt, none)
        model.get_output_embeddings().weight.mul_(2.0)  # type: ignore[union-attr, operator]
        assert torch.equal(own.prefill(prompt, none), before)
        own.use(own.copied(model))
        assert not torch.equal(own.prefill(prompt, none), before)


def test_a_sample_does_not_depend_on_its_batch(decoder: Decoder) -> None:
    together = generate(decoder, requests(stop_token_ids=(40, 41)), CPU)
    for request, completions in zip(requests(stop_token_ids=(40, 41)), together, strict=True):
        for seed, completion in zip(request.seeds, completions, strict=True):
            (alone,) = generate(decoder, [Request(request.prompt_ids, request.params, [seed])], CPU)[0]
            assert alone.token_ids.tolist() == completion.token_ids.tolist()
            assert np.abs(alone.logprobs - completion.logprobs).max() < 1e-5


class CountingDecoder:
    """Wraps a decoder and records how many rows it decoded at each step."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.rows: list[int] = []

    def prefill(self, prompts: torch.Tensor, padding: torch.Tensor, media: Sequence[Placement] = ()) -> torch.Tensor:
        return self.decoder.prefill(prompts, padding, media)

    def select(self, rows: torch.Tensor) -> None:
        self.decoder.select(rows)

    def release(self) -> None:
        self.decoder.release()

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(tokens))
        return self.decoder.step(tokens)

    def copied(self, model: PreTrainedModel, into: Any = None) -> Any:
        return self.decoder.copied(model, into)

    @property
    def weights(self) -> Any:
        return self.decoder.weights

    def use(self, weights: Any) -> None:
        self.decoder.use(weights)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fused", "transformers"])
def test_completions_share_rows_until_they_differ(kind: str, decoder: Decoder, model_folder: Path) -> None:
    if kind == "transformers":
        decoder = TransformersDecoder(AutoModelForCausalLM.from_pretrained(model_folder).eval(), shared=True)
    likely = {"temperature": 0.2, "max_response_tokens": 40, "stop_token_ids": tuple(range(0, 250, 9))}
    batch = requests(seeds=24, **likely)
    counting = CountingDecoder(decoder)
    together = generate(counting, batch, CPU)
    for request, completions in zip(batch, together, strict=True):
        for seed, completion in zip(request.seeds, completions, strict=True):
            (alone,) = generate(decoder, [Request(request.prompt_ids, request.params, [seed])], CPU)[0]
            assert alone.token_ids.tolist() == completion.token_ids.tolist()
            assert np.abs(alone.logprobs - completion.logprobs).max() < 1e-5 / request.params.temperature
            assert alone.finish_reason is completion.finish_reason

    sampled = [[tuple(c.token_ids.tolist()) for c in completions] for completions in together]
    assert any(len(set(ids)) < len(ids) for ids in sampled)  # some agree to the end
    for position, rows in enumerate(counting.rows, start=1):
        prefixes = [{ids[:position] for ids in part if len(ids) > position} for part in sampled]
        distinct = sum(map(len, prefixes))
        assert distinct <= rows < distinct / COMPACT_BELOW


@pytest.mark.parametrize("tokens_ahead", [3, 16, 100])
def test_tokens_ahead_change_nothing(decoder: Decoder, tokens_ahead: int) -> None:
    params = [
        SamplingParams(max_response_tokens=3),
        SamplingParams(max_response_tokens=70, stop_token_ids=tuple(range(0, 250, 20))),
        SamplingParams(max_response_tokens=37, temperature=0.5, stop_token_ids=(50, 51, 52)),
    ]
    batch = [Request(r.prompt_ids, p, r.seeds) for r, p in zip(requests(seeds=8), params, strict=True)]
    expected = generate(decoder, batch, CPU)
    found = generate(decoder, batch, CPU, tokens_ahead=tokens_ahead)
    assert {c.finish_reason for c in flat(expected)} == {FinishReason.STOP, FinishReason.LENGTH}
    for before, after in zip(flat(expected), flat(found), strict=True):
        assert after.token_ids.tolist() == before.token_ids.tolist()
        assert after.finish_reason is before.finish_reason
        assert np.abs(after.logprobs - before.logprobs).max() < 1e-5


def test_seeds_matter_and_repeat(decoder: Decoder) -> None:
    first, again = (flat(generate(decoder, requests(), CPU)) for _ in range(2))
    assert [c.token_ids.tolist() for c in first] == [c.token_ids.tolist() for c in again]
    assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(first, again, strict=True))
    assert len({tuple(c.token_ids.tolist()) for c in first}) == len(first)


def test_stop_tokens_end_a_completion_and_are_part_of_it(decoder: Decoder) -> None:
    stops = set(range(0, 250, 5))
    results = flat(generate(decoder, requests(seeds=20, stop_token_ids=tuple(stops)), CPU))
    assert {c.finish_reason for c in results} == {FinishReason.STOP, FinishReason.LENGTH}
    for completion in results:
        *body, last = completion.token_ids.tolist()
        assert not stops & set(body)
        has_stopped = completion.finish_reason is FinishReason.STOP
        assert (last in stops) == has_stopped
        assert has_stopped or len(completion.token_ids) == 12
        assert len(completion.logprobs) == len(completion.token_ids)


def test_requests_with_different_parameters_share_a_batch(decoder: Decoder) -> None:
    base = requests()
    params = [
        SamplingParams(max_response_tokens=3),
        SamplingParams(max_response_tokens=70, temperature=0.0),
        SamplingParams(max_response_tokens=20, temperature=2.0, top_k=4, stop_token_ids=(50,)),
    ]
    mixed = [Request(r.prompt_ids, p, r.seeds) for r, p in zip(base, params, strict=True)]
    together = generate(decoder, mixed, CPU)
    assert [len(c.token_ids) for c in together[0]] == [3, 3, 3]
    assert [len(c.token_ids) for c in together[1]] == [70, 70, 70]
    for request, completions in zip(mixed, together, strict=True):
        (alone,) = generate(decoder, [request], CPU)
        assert [c.token_ids.tolist() for c in alone] == [c.token_ids.tolist() for c in completions]


def test_greedy_takes_the_likeliest_and_reports_the_untempered_distribution(
    decoder: Decoder, model_folder: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    for request in requests(temperature=0.0):
        completions = generate(decoder, [request], CPU)[0]
        expected = model.generate(
            torch.from_numpy(request.prompt_ids.astype(np.int64))[None],
            attention_mask=torch.ones(1, len(request.prompt_ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(request.prompt_ids) :]
        for completion in completions:
            assert completion.token_ids.tolist() == expected.tolist()
            assert np.abs(completion.logprobs - recomputed(model, request.prompt_ids, completion, 1.0)).max() < 1e-5


class FixedDecoder:
    """Always returns the same logits."""

    def __init__(self, probabilities: list[float]) -> None:
        self.logits = torch.tensor(probabilities).log()[None]

    def prefill(self, prompts: torch.Tensor, padding: torch.Tensor, media: Sequence[Placement] = ()) -> torch.Tensor:
        return self.logits.repeat(len(prompts), 1)

    def select(self, rows: torch.Tensor) -> None:
        pass

    def release(self) -> None:
        pass

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits.repeat(len(tokens), 1)

    def sync(self, model: PreTrainedModel) -> None:
        pass


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        ({"top_k": 2}, [0.0, 4 / 7, 0.0, 3 / 7]),
        ({"top_p": 0.65}, [0.0, 4 / 7, 0.0, 3 / 7]),
        ({"top_p": 0.75}, [0.0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 0.001}, [0.0, 1.0, 0.0, 0.0]),
        ({"top_k": 3, "top_p": 0.5}, [0.0, 4 / 7, 0.0, 3 / 7]),
    ],
)
def test_frequencies(params: dict[str, Any], expected: list[float]) -> None:
    draws = 4000
    request = Request(np.zeros(1, np.int32), SamplingParams(max_response_tokens=8, **params), range(draws // 8))
    (completions,) = generate(FixedDecoder([0.1, 0.4, 0.2, 0.3]), [request], CPU)
    tokens = np.concatenate([c.token_ids for c in completions])
    frequencies = np.bincount(tokens, minlength=4) / len(tokens)
    assert np.abs(frequencies - expected).max() < 4 * np.sqrt(0.25 / draws)
    assert (frequencies[np.array(expected) == 0] == 0).all()
    # log-probabilities are those after the temperature and before truncation
    temperature = params.get("temperature", 1.0)
    full = torch.log_softmax(torch.tensor([0.1, 0.4, 0.2, 0.3]).log() / temperature, -1).numpy()
    assert np.allclose(np.concatenate([c.logprobs for c in completions]), full[tokens], atol=1e-6)


def test_uniform_numbers_are_counted_and_not_drawn() -> None:
    seeds = np.array([0, 1, 2**63 - 1], np.uint64)
    whole = uniforms(seeds, 0, 64)
    assert np.array_equal(whole[1:, 32:], uniforms(seeds[1:], 32, 32))
    many = uniforms(np.arange(2000, dtype=np.uint64), 0, 50)
    assert 0 <= many.min() < 1e-3 < 0.999 < many.max() < 1
    histogram = np.histogram(many, 20, (0, 1))[0]
    assert ((histogram - 5000) ** 2 / 5000).sum() < 45  # chi-squared with 19 degrees of freedom, p = 0.0007
    for left, right in ((many[:, :-1], many[:, 1:]), (many[:-1], many[1:])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.015


@pytest.mark.parametrize("kept_bytes", [0, 100_000], ids=["large", "from small to large"])
def test_large_caches_give_the_same_numbers(decoder: Decoder, kept_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"max_response_tokens": 60, "temperature": 0.4, "stop_token_ids": tuple(range(0, 250, 7))}
    expected = flat(generate(decoder, requests(seeds=12, **params), CPU))
    monkeypatch.setattr(cache, "KEPT_BLOCK_BYTES", kept_bytes)
    monkeypatch.setattr(cache, "CACHE_STEP_POSITIONS", 5)
    found = flat(generate(decoder, requests(seeds=12, **params), CPU))
    for before, after in zip(expected, found, strict=True):
        assert after.token_ids.tolist() == before.token_ids.tolist()
        assert np.abs(after.logprobs - before.logprobs).max() < 1e-5


@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layout_of_a_head_gives_the_same_logits(
    dtype: torch.dtype, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_float32_matmul_precision()
    fused = FusedDecoder(tiny_model("qwen3"), dtype)
    ids = torch.arange(20)[:, None] % 97
    found = []
    try:
        torch.set_float32_matmul_precision(precision)
        with torch.inference_mode():
            for is_large in (False, True):
                monkeypatch.setattr("rllm_local.fused.LARGE_VOCABULARY", 97 if is_large else 98)
                monkeypatch.setattr("rllm_local.fused.TRANSPOSED_TOKENS", 40)
                for rows in (3, 20, 5):  # fewer rows use a part of the memory
                    fused.prefill(ids[:rows], torch.zeros(rows, dtype=torch.long))
                    found.append(fused.step(ids[:rows, 0]).clone())
    finally:
        torch.set_float32_matmul_precision(before)
    for expected, logits in zip(found[:3], found[3:], strict=True):
        assert torch.allclose(logits, expected, atol=1e-5)
    assert len(fused._kept_logits) == 20 * 97
