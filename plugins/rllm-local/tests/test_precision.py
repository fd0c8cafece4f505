"""Sampling in bfloat16 agrees with training, on logits that spread as those of trained models do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rllm_local.config import LocalConfig, LoRAConfig
from rllm_local.decoders import TransformersDecoder
from rllm_local.fused import FusedDecoder
from rllm_local.model import load_model, make_decoder
from rllm_local.sampler import Request, generate
from rllm_local.training import LocalTrainer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rllm_core.algorithms.aggregation import Aggregation
from rllm_core.builtin.losses import ReinforceLoss
from rllm_core.config import OptimizerConfig
from rllm_core.types import SamplingParams, TrainingSample

# The README's bound, as shares of the standard deviation of the logits.
MEAN_BOUND, BOUND = 0.01, 0.1
SPREAD = 3.6  # of trained models; that of random weights is about 0.4
VOCABULARY = 2003
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "pad_token_id": 0,
}


def spread_out(model: PreTrainedModel, spread: float = SPREAD) -> PreTrainedModel:
    head: Any = model.get_output_embeddings()
    with torch.no_grad():
        found = model(input_ids=torch.arange(64)[None] * 31).logits.float().std(-1).mean()
        head.weight.mul_(spread / found)
    return model


def saved(folder: Path, model_type: str, **options: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SHAPE | {"tie_word_embeddings": False} | options)
    spread_out(AutoModelForCausalLM.from_config(config).eval()).save_pretrained(folder)
    return folder


def differences(model: PreTrainedModel, decoder: Any) -> np.ndarray:
    """Returns differences between sampled and trained log-probabilities, as shares of ``SPREAD``."""
    trainer = LocalTrainer(
        model=model,
        loss=ReinforceLoss(),
        aggregation=Aggregation("token_mean"),
        temperature=1.0,
        optimizer_config=OptimizerConfig(learning_rate=1e-3),
        share_prefixes=True,
        max_batch_tokens=4096,
        autocast_dtype=torch.bfloat16,
    )
    rng, params = np.random.default_rng(0), SamplingParams(max_response_tokens=24)
    requests = [
        Request(rng.integers(0, VOCABULARY, length).astype(np.int32), params, [10 * length + k for k in range(4)])
        for length in (5, 9, 14)
    ]
    samples = [
        TrainingSample(
            group_id=0,
            rollout_id=str(request.seeds[number]),
            token_ids=np.concatenate([request.prompt_ids, completion.token_ids]),
            turn_spans=((len(request.prompt_ids), len(request.prompt_ids) + len(completion.token_ids)),),
            logprobs=completion.logprobs,
            advantages=np.ones(len(completion.token_ids), np.float32),
            weight_versions=(0,),
        )
        for request, completions in zip(requests, generate(decoder, requests, torch.device("cpu")), strict=True)
        for number, completion in enumerate(completions)
    ]
    sampled = np.concatenate([sample.logprobs for sample in samples if sample.logprobs is not None])
    return np.abs(sampled - np.concatenate(trainer.logprobs(samples))) / SPREAD


HALF = LocalConfig(device="cpu", dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("shares_weights", [True, False])
@pytest.mark.parametrize(
    ("model_type", "local", "is_fused"),
    [
        ("qwen3", HALF, True),
        ("llama", HALF, True),
        ("qwen2", HALF.model_copy(update={"lora": LoRAConfig(rank=4)}), True),
        ("mistral", HALF, False),
    ],
    ids=["qwen3", "llama", "adapters", "transformers"],
)
def test_the_sampler_agrees_with_the_trainer(
    tmp_path: Path, model_type: str, local: LocalConfig, is_fused: bool, shares_weights: bool
) -> None:
    model = load_model(saved(tmp_path, model_type), local)
    decoder = make_decoder(model, local, shares_weights=shares_weights)
    assert isinstance(decoder, FusedDecoder) == is_fused
    found = differences(model, decoder)
    assert 0 < found.mean() < MEAN_BOUND
    assert found.max() < BOUND


@pytest.mark.slow
def test_a_wrong_weight_is_found_in_bfloat16(tmp_path: Path) -> None:
    model = load_model(saved(tmp_path, "llama"), HALF)
    fused = FusedDecoder(model, torch.bfloat16)
    plain = TransformersDecoder(model, shared=True, autocast_dtype=torch.bfloat16)
    with torch.inference_mode():
        assert fused.agrees_with(plain, VOCABULARY)
        model.get_decoder().layers[3].post_attention_layernorm.weight.mul_(1.3)
        assert not fused.agrees_with(plain, VOCABULARY)
