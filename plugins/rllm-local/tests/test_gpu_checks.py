"""The checks that ``tests/gpu/test_local.py`` makes on a GPU, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rllm_local.config import LocalConfig
from rllm_local.model import TorchSettings
from transformers import AutoConfig, AutoModelForCausalLM

# Last, because the folder has a conftest.py, which others import by this name.
sys.path.append(str(Path(__file__).parents[3] / "tests" / "gpu"))

import local_side
from local_side import Side

VOCABULARY = 20_011


@pytest.fixture(scope="module", autouse=True)
def _restored_settings() -> Iterator[None]:
    before = TorchSettings.current()
    yield
    before.apply()


@pytest.fixture(scope="module")
def side_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Side]:
    folder = tmp_path_factory.mktemp("large-vocabulary")
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)

    def made(**local: Any) -> Side:
        return Side(folder, LocalConfig(device="cpu", **local))

    return made


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampling_rounds_as_training_does(dtype: str, side_of: Callable[..., Side]) -> None:
    found = local_side.sampler_and_trainer(side_of(dtype=dtype), tokens=16)
    assert found["fused"]
    assert found["mean"] < (1e-5 if dtype == "float32" else 0.03)


@pytest.mark.slow
def test_passes_have_the_same_gradient(side_of: Callable[..., Side]) -> None:
    side = side_of()
    found = local_side.chunked_head(side)
    assert 0 < found["gradient"] < 1e-4
    assert found["logprobs"] < 1e-5
    assert local_side.recomputed_layers(side)["gradient"] < 1e-4


@pytest.mark.slow
def test_samplers_give_the_same_tokens(side_of: Callable[..., Side]) -> None:
    side = side_of()
    assert local_side.tokens_ahead(side) >= 0.9
    assert local_side.truncated_draws("cpu", VOCABULARY, rows=3) == 1
    found = local_side.with_and_without_graphs(side)
    assert found["same"] >= 0.9
    assert found["gap"] < 1e-5
    engine, completions, _ = local_side.engine_of_its_own_thread(side, 0.02)
    assert engine._stream is None
    expected = side.sampled(side.requests(1, 64, 100))
    same = [a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(expected, completions, strict=True)]
    assert sum(same) >= 0.9 * len(same)
