"""The kernels of ``rllm-local[fast]`` compute what torch computes, and are used only where they do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rllm_local import fast, preflight
from rllm_local.backend import LocalBackend
from rllm_local.config import LocalConfig
from rllm_local.fused import FusedDecoder
from rllm_local.kernel_decoder import KernelDecoder
from rllm_local.model import make_decoder
from rllm_local.sampler import Request, generate
from rllm_local.starter import cache_dir
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rllm_core.config import RunConfig
from rllm_core.plugins import PluginManager
from rllm_core.types import SamplingParams, TokenOutput

LOGPROB_ERROR = 4e-6
CPU = torch.device("cpu")


def model_of(kind: str, heads: int, kv_heads: int, dim: int, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim, "num_hidden_layers": 2}
    sizes = {"vocab_size": 97, "hidden_size": 96, "intermediate_size": 96, "initializer_range": 0.1}
    config = AutoConfig.for_model(kind, **shape, **sizes, pad_token_id=0, **options)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


def completions(decoder: Any) -> list[TokenOutput]:
    """Samples from prompts of several lengths, so that rows are padded, branch, end early, and outgrow the cache."""
    rng = np.random.default_rng(0)
    requests = [
        Request(
            rng.integers(1, 97, length).astype(np.int32),
            SamplingParams(max_response_tokens=most, stop_token_ids=(5,)),
            [10 * length + number for number in range(3)],
        )
        for length, most in ((1, 40), (15, 90), (16, 7), (33, 60))
    ]
    return [completion for found in generate(decoder, requests, CPU) for completion in found]


def test_the_environment_of_the_tests_has_the_extra() -> None:
    assert fast.is_installed()


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "dim", "options"),
    [
        ("qwen3", 4, 2, 32, {}),
        ("llama", 3, 3, 16, {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", 7, 1, 48, {}),
        ("llama", 6, 2, 64, {}),
    ],
)
def test_the_sampler_computes_what_it_does_without_kernels(
    kind: str, heads: int, kv_heads: int, dim: int, options: dict[str, Any]
) -> None:
    model = model_of(kind, heads, kv_heads, dim, **options)
    plain = completions(FusedDecoder(model, torch.float32))
    assert KernelDecoder.supports(model)
    with_kernels = completions(KernelDecoder(model, torch.float32))
    assert len({len(completion.token_ids) for completion in plain}) > 3
    compared = 0
    for mine, theirs in zip(with_kernels, plain, strict=True):
        same = min(len(mine.token_ids), len(theirs.token_ids))
        differs = np.flatnonzero(mine.token_ids[:same] != theirs.token_ids[:same])
        same = int(differs[0]) if len(differs) else same  # a number was drawn at the boundary of two tokens
        assert np.abs(mine.logprobs[:same] - theirs.logprobs[:same]).max() <= LOGPROB_ERROR
        compared += same
    assert compared > 0.9 * sum(len(completion.token_ids) for completion in plain)


def test_the_kernels_are_used_only_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(model: PreTrainedModel, local: LocalConfig) -> type:
        return type(make_decoder(model, local, shares_weights=True))

    cpu, model = LocalConfig(device="cpu"), model_of("qwen3", 4, 2, 32)
    assert kind(model, cpu) is KernelDecoder
    assert kind(model_of("qwen3", 4, 2, 24), cpu) is FusedDecoder
    assert kind(model, LocalConfig(device="cpu", dtype="bfloat16")) is FusedDecoder
    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_num_threads", lambda: 2)
        assert kind(model, cpu) is FusedDecoder
    monkeypatch.setattr(fast, "is_installed", lambda: False)
    monkeypatch.setattr(fast, "loaded", lambda: pytest.fail("the kernels are loaded"))
    assert kind(model, cpu) is FusedDecoder


@pytest.mark.parametrize(("name", "result"), [("decode", 7), ("normalise", 3), ("activate", 2)])
def test_a_wrong_kernel_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, result: int
) -> None:
    kernels = {kept: getattr(fast.loaded(), kept) for kept in ("decode", "normalise", "activate")}

    def wrong(*arguments: Any) -> None:
        kernels[name](*arguments)
        arguments[result][:] *= 1.01

    monkeypatch.setattr(fast, "loaded", lambda: SimpleNamespace(**{**kernels, name: wrong}))
    model = model_of("qwen3", 4, 2, 32)
    assert type(make_decoder(model, LocalConfig(device="cpu"), shares_weights=True)) is FusedDecoder
    assert "the fused decoder with the kernels of rllm-local[fast] disagrees" in caplog.text


def test_compiled_code_is_kept_in_the_cache_of_the_user() -> None:
    kept = {file.name.split("-")[0] for file in (cache_dir() / "kernels").rglob("*.nbi")}
    assert {f"kernels.{name}" for name in ("decode", "normalise", "activate")} <= kept


@pytest.mark.parametrize(("state", "installed", "said"), [
    ({"kernels": True}, False, "the run began with the kernels of rllm-local[fast], and this machine lacks them"),
    ({}, True, "the run began without the kernels of rllm-local[fast], and this machine has them"),
    ({"kernels": True}, True, ""),
    ({}, False, ""),
])  # fmt: skip
def test_a_resume_says_that_numbers_will_differ(
    run_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    state: dict[str, Any],
    installed: bool,
    said: str,
) -> None:
    monkeypatch.setattr(fast, "is_installed", lambda: installed)
    backend = LocalBackend(run_config(), PluginManager.from_environment())
    with caplog.at_level(logging.WARNING):
        backend.load_state_dict({"step": 3, **state})
    assert backend.state_dict() == {"step": 3, "kernels": installed}
    assert caplog.text.count("uninterrupted run") == bool(said)
    assert said in caplog.text


@pytest.mark.parametrize(
    ("installed", "said"), [(True, "the kernels of rllm-local[fast]"), (False, "is not installed")]
)
def test_a_dry_run_says_who_computes_sampling(
    run_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, installed: bool, said: str
) -> None:
    monkeypatch.setattr(fast, "is_installed", lambda: installed)
    found = preflight.estimated_memory(run_config(), LocalConfig(device="cpu"), None)
    assert not isinstance(found, str)
    assert said in found.lines()[-2] + found.lines()[-1]
    assert preflight.kernels_of(LocalConfig(device="cpu", dtype="bfloat16")) is None
