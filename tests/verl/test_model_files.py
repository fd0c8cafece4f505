"""Models whose files lack weights, which verl's trainers would draw at random."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from rllm_verl.settings import verl_settings
from rllm_verl.worker import PolicyWorker, random_weights
from safetensors.torch import load_file, save_file
from verl_runs import run_config

from rllm_core.config import ConfigError

QUERY, WEIGHTS = "model.layers.0.self_attn.q_proj.weight", "model.safetensors"


def damaged(model: Path, folder: Path, query: torch.Tensor | None) -> Path:
    """A copy of a model with another query projection in its first layer, or without one."""
    shutil.copytree(model, folder)
    weights = load_file(folder / WEIGHTS)
    del weights[QUERY]
    save_file(weights if query is None else weights | {QUERY: query}, folder / WEIGHTS, {"format": "pt"})
    return folder


@pytest.mark.parametrize("query", [None, torch.zeros(2, 2)], ids=["missing", "of another size"])
def test_a_model_that_lacks_weights_is_rejected_before_it_is_loaded(
    model: Path, tmp_path: Path, query: torch.Tensor | None
) -> None:
    run = run_config(damaged(model, tmp_path / "damaged", query))
    worker = object.__new__(PolicyWorker)
    worker._run, worker._settings = run, verl_settings(run)
    with pytest.raises(ConfigError, match=rf"lack weights .*\({QUERY}\)"):
        worker.init_model()


def test_a_complete_model_lacks_none(model: Path) -> None:
    assert random_weights(str(model), verl_settings(run_config(model))) == []
