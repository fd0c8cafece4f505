"""Architectures beyond the usual ones: the same numbers in sampling, in training and in transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rllm_local.config import LocalConfig, LoRAConfig
from rllm_local.decoders import TransformersDecoder, max_model_tokens
from rllm_local.fused import FusedDecoder
from rllm_local.memory import cache_copies
from rllm_local.model import (
    load_model,
    make_decoder,
    max_cache_positions,
    trained_parameters,
    use_matching_attention,
)
from rllm_local.sampler import Request, generate
from rllm_local.training import LocalTrainer
from transformers import AutoModelForCausalLM, PreTrainedModel

from rllm_core.algorithms.aggregation import Aggregation
from rllm_core.builtin.losses import ReinforceLoss
from rllm_core.config import OptimizerConfig
from rllm_core.errors import ConfigError
from rllm_core.types import SamplingParams, TrainingSample

WINDOW = 16
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
SHARING: dict[str, dict[str, Any]] = {
    "Llama": {},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "OPT": {"ffn_dim": 64},
}
"""Architectures whose samples share prefixes in training, and what their configurations need beyond `SHAPE`."""
WINDOWED: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": WINDOW},
    "Starcoder2": {"sliding_window": WINDOW, "use_sliding_window": True},
    "GPTNeo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
}
"""Architectures whose configurations have a window, but no ``layer_types``."""
SEPARATE: dict[str, dict[str, Any]] = {
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Gemma2": {"sliding_window": WINDOW, "head_dim": 8},
    "Gemma4Text": {
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 8,
    },
    "Jamba": {"num_experts": 2, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "Llama4Text": {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 4},
    "ModernBertDecoder": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "Qwen3Next": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
"""Architectures with windows or heads by layer, biases by column, convolutions, recurrent states or other decoders."""
ALL = SHARING | WINDOWED | SEPARATE
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LIMITED: dict[str, dict[str, Any]] = {
    "OPT": {"max_position_embeddings": 64},
    "Phi3": {"original_max_position_embeddings": 64, "rope_parameters": LONG_ROPE, "pad_token_id": 0},
}
"""Architectures with other numbers, or none, beyond some position."""
REJECTED: dict[str, dict[str, Any]] = {"Mamba": {"state_size": 8}, "RecurrentGemma": {"num_hidden_layers": 3}}
"""Architectures that transformers decodes with other numbers in padded batches."""


def model_of(architecture: str, **settings: Any) -> PreTrainedModel:
    """Returns a random model whose layers differ enough for wrong masks to show."""
    config = getattr(transformers, f"{architecture}Config")(**SHAPE | (ALL | REJECTED).get(architecture, {}) | settings)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    use_matching_attention(model, "highest")
    return model.eval()


def trainer_of(architecture: str, autocast_dtype: torch.dtype | None = None) -> LocalTrainer:
    return LocalTrainer(
        model=model_of(architecture),
        loss=ReinforceLoss(),
        aggregation=Aggregation("token_mean"),
        temperature=1.0,
        optimizer_config=OptimizerConfig(learning_rate=1e-3),
        share_prefixes=True,
        max_batch_tokens=4096,
        autocast_dtype=autocast_dtype,
    )


def group(prompt: int, *completions: int) -> list[TrainingSample]:
    """Returns samples with one prompt of that many tokens, and completions of those lengths."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, 256, prompt)
    return [
        TrainingSample(
            group_id=0,
            rollout_id=str(index),
            token_ids=np.concatenate([start, rng.integers(0, 256, length)]),
            turn_spans=((prompt, prompt + length),),
            logprobs=None,
            advantages=np.ones(length),
            weight_versions=(0,),
        )
        for index, length in enumerate(completions)
    ]


GROUPS: dict[str, Callable[[], list[TrainingSample]]] = {
    "short": lambda: group(4, 3, 3, 2),
    "beyond the window": lambda: group(20, 6, 6, 3),
    "long": lambda: group(10, 150, 140, 30),
}


@torch.no_grad()
def plain_logprobs(model: Any, sample: TrainingSample) -> np.ndarray:
    """Returns the log-probabilities of the completion by transformers, alone and without a cache."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    prompt = sample.turn_spans[0][0]
    found: np.ndarray = logprobs.gather(1, ids[0, 1:, None])[prompt - 1 :, 0].numpy()
    return found


@pytest.mark.parametrize("lengths", GROUPS)
@pytest.mark.parametrize("architecture", ALL)
def test_training_computes_the_logprobs_of_transformers(architecture: str, lengths: str) -> None:
    trainer, samples = trainer_of(architecture), GROUPS[lengths]()
    for found, sample in zip(trainer.logprobs(samples), samples, strict=True):
        assert np.abs(found - plain_logprobs(trainer.model, sample)).max() < 1e-4


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("architecture", ALL)
def test_prefixes_are_shared_where_that_changes_no_number(architecture: str, dtype: torch.dtype | None) -> None:
    rows = trainer_of(architecture, dtype).batch(GROUPS["short"](), skip_zero_advantages=False).rows
    assert any(row.is_tree for row in rows) == (architecture not in SEPARATE)


@pytest.mark.parametrize("architecture", WINDOWED)
def test_rows_beyond_the_window_share_nothing(architecture: str) -> None:
    rows = trainer_of(architecture).batch(GROUPS["beyond the window"](), skip_zero_advantages=False).rows
    assert not any(row.is_tree for row in rows)


@pytest.mark.parametrize("architecture", ALL)
@torch.inference_mode()
def test_sampling_computes_the_logits_of_transformers(architecture: str) -> None:
    model: Any = model_of(architecture)
    decoder = TransformersDecoder(model, shared=True)
    short, long = (torch.from_numpy(s.token_ids.astype(np.int64)) for s in group(14, 2, 10))
    prompts = torch.stack([torch.nn.functional.pad(short, (len(long) - len(short), 0)), long])
    first = decoder.prefill(prompts, torch.tensor([len(long) - len(short), 0]))
    decoder.select(torch.tensor([1, 0, 1]))
    tokens = torch.tensor([5, 6, 7])
    second = decoder.step(tokens)
    decoder.select(torch.tensor([1, 2]))
    third = decoder.step(torch.tensor([8, 9]))

    def plain(*ids: torch.Tensor | list[int]) -> torch.Tensor:
        row = torch.cat([torch.as_tensor(part) for part in ids])
        logits: torch.Tensor = model(input_ids=row[None], use_cache=False).logits[0, -1].float()
        return logits

    expected = [plain(short), plain(long), plain(long, [5]), plain(short, [6]), plain(long, [7])]
    expected += [plain(short, [6, 8]), plain(long, [7, 9])]
    found = torch.cat([first, second, third])
    assert torch.allclose(found.log_softmax(-1), torch.stack(expected).log_softmax(-1), atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ALL)
def test_a_decoder_that_computes_the_same_logits_is_used(architecture: str, dtype: Any) -> None:
    decoder = make_decoder(model_of(architecture), LocalConfig(device="cpu", dtype=dtype), shares_weights=True)
    assert isinstance(decoder, FusedDecoder if architecture == "Llama" else TransformersDecoder)


@pytest.mark.parametrize("architecture", ["Mistral", "Gemma4Text"])
@torch.inference_mode()
def test_the_limit_of_the_cache_counts_the_heads_of_every_layer(architecture: str) -> None:
    model = model_of(architecture)
    decoder = TransformersDecoder(model, shared=True)
    decoder.prefill(torch.arange(10)[None], torch.tensor([0]))
    caches: Any = decoder._cache.layers
    position_bytes = sum(cache.keys.nbytes + cache.values.nbytes for cache in caches) / 10
    most = max_cache_positions(model, LocalConfig(device="cpu", max_cache_gb=1.0))
    assert most == int(1e9 / (cache_copies(len(caches)) * position_bytes))


@pytest.mark.parametrize("shares_weights", [True, False])
@torch.inference_mode()
def test_trained_adapters_of_the_embedding_are_sampled_with(tmp_path: Path, *, shares_weights: bool) -> None:
    model_of("Llama").save_pretrained(tmp_path)
    config = LocalConfig(device="cpu", lora=LoRAConfig(target_modules=("q_proj", "embed_tokens")))
    model: Any = load_model(tmp_path, config)
    decoder = make_decoder(model, config, shares_weights=shares_weights)
    for parameter in trained_parameters(model).values():
        parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    decoder.use(decoder.copied(model, decoder.weights))
    prompt = torch.arange(5)[None]
    found = decoder.prefill(prompt, torch.tensor([0]))
    assert torch.allclose(found, model(input_ids=prompt, use_cache=False).logits[:, -1], atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "adapted_layers", "without"),
    [
        ("DeepseekV4", ["q_a_proj", "o_b_proj"], ["o_a_proj"]),
        ("Falcon", ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"], []),
        ("Llama4Text", ["shared_expert.up_proj", "q_proj"], ["router"]),
        ("Mixtral", ["experts", "q_proj"], []),
    ],
)
@torch.inference_mode()
def test_adapters_of_every_linear_layer_leave_the_logits(
    architecture: str, adapted_layers: list[str], without: list[str], tmp_path: Path
) -> None:
    plain: Any = model_of(architecture)
    plain.save_pretrained(tmp_path)
    adapted: Any = load_model(tmp_path, LocalConfig(device="cpu", lora=LoRAConfig(rank=2)))
    names = trained_parameters(adapted)
    assert all(any(f"{layer}." in name for name in names) for layer in adapted_layers)
    assert not any(f"{layer}." in name for name in names for layer in without)
    prompt = torch.arange(5)[None]
    assert torch.allclose(adapted(input_ids=prompt).logits, plain(input_ids=prompt).logits, atol=1e-4)


@pytest.mark.parametrize("architecture", LIMITED)
def test_no_row_of_a_batch_leaves_the_positions_of_the_model(architecture: str) -> None:
    model = model_of(architecture, **LIMITED[architecture])
    most = max_model_tokens(model)
    assert most is not None
    requests = [
        Request(sample.token_ids, SamplingParams(max_response_tokens=tokens), [0])
        for sample, tokens in zip(group(4, most - 6, 1, 2, 3, 4), (2, 30, 30, 30, 30), strict=True)
    ]
    outputs = generate(TransformersDecoder(model, shared=True), requests, torch.device("cpu"))
    for asked, [output] in zip(requests, outputs, strict=True):
        ids, start = np.concatenate([asked.prompt_ids, output.token_ids]), len(asked.prompt_ids)
        sample = group(4, 1)[0].model_copy(update={"token_ids": ids, "turn_spans": ((start, len(ids)),)})
        assert np.abs(output.logprobs - plain_logprobs(model, sample)).max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", REJECTED)
def test_a_model_that_is_sampled_with_other_logits_is_rejected(architecture: str, dtype: Any) -> None:
    kind = {"Mamba": "mamba", "RecurrentGemma": "recurrent_gemma"}[architecture]
    with pytest.raises(ConfigError, match=f"cannot sample from models of type '{kind}'"):
        make_decoder(model_of(architecture), LocalConfig(device="cpu", dtype=dtype), shares_weights=True)


@pytest.mark.parametrize(("architecture", "positions"), [("Llama", 512), ("Bloom", None)])
def test_the_configuration_limits_the_positions_or_nothing_does(architecture: str, positions: int | None) -> None:
    settings = dict(SHAPE | ALL[architecture])
    if positions is None:
        del settings["max_position_embeddings"]
    config = getattr(transformers, f"{architecture}Config")(**settings)
    assert max_model_tokens(AutoModelForCausalLM.from_config(config)) == positions
