"""Model folders that transformers loads with a warning, but that must not be trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rllm_local.config import LocalConfig
from rllm_local.model import load_model
from safetensors.torch import load_file, save_file

from rllm_core.errors import ConfigError
from rllm_core.memory.transformer import TransformerShape
from rllm_core.model_files import read_model_file

Weights = dict[str, torch.Tensor]
QUERY, WEIGHTS = "model.layers.0.self_attn.q_proj.weight", "model.safetensors"


def without_a_weight(weights: Weights) -> Weights:
    return {name: weight for name, weight in weights.items() if name != QUERY}


def under_other_names(weights: Weights) -> Weights:
    return {f"policy.{name}": weight for name, weight in weights.items()}


def with_another_size(weights: Weights) -> Weights:
    return weights | {QUERY: weights[QUERY][:4].clone()}


def with_a_nan(weights: Weights) -> Weights:
    weights[QUERY][0, 0] = torch.nan
    return weights


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_a_weight, rf"lack weights .*\({QUERY}\)"),
        (under_other_names, r"lack weights .*\(model.embed_tokens.weight and \d+ more\)"),
        (with_another_size, rf"lack weights .*\({QUERY}\)"),
        (with_a_nan, f"{QUERY} has NaN"),
    ],
)
def test_weights_that_are_random_or_no_numbers_are_rejected(
    folder: Path, damage: Callable[[Weights], Weights], said: str
) -> None:
    save_file(damage(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ConfigError, match=said) as caught:
        load_model(folder, LocalConfig())
    assert "\n" not in str(caught.value)


def test_weights_that_the_model_does_not_have_are_ignored(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    save_file(weights | {"value_head.weight": torch.zeros(1, 2)}, folder / WEIGHTS, {"format": "pt"})
    assert torch.equal(load_model(folder, LocalConfig()).state_dict()[QUERY], weights[QUERY])


@pytest.mark.parametrize(
    "written", [b"", b"version https://git-lfs.github.com/spec/v1\nsize 1\n", b"\x80" + b"\0" * 90]
)
def test_a_file_of_weights_that_is_not_one_is_rejected(folder: Path, written: bytes) -> None:
    (folder / WEIGHTS).write_bytes(written)
    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model") as caught:
        load_model(folder, LocalConfig())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("written", ["{", "[]", "\ud800"])
def test_a_damaged_description_is_one_line(folder: Path, written: str) -> None:
    file = folder / "config.json"
    file.write_bytes(written.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=r"config\.json of model .* cannot be read") as caught:
        read_model_file(file)
    assert "\n" not in str(caught.value)


def test_a_description_without_sizes_has_no_shape(folder: Path) -> None:
    described = read_model_file(folder / "config.json")
    assert TransformerShape.of(described) is not None
    assert TransformerShape.of(json.loads('{"model_type": "qwen3", "vocab_size": 100}')) is None
