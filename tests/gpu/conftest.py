"""Backend ``verl`` on GPUs: ``pytest -m gpu tests/gpu`` in an environment with ``rllm-verl[gpu]`` and ``rllm-local``.

Nothing here imports verl when it is collected, so that tests skip where there is neither verl nor a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Random weights, about 200 M parameters: large enough to measure memory use and transfer time.
MODEL = {
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 3072,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips the test before its fixtures are created; ``gpu(N)`` needs N GPUs."""
    mark = item.get_closest_marker("gpu")
    if mark is None:
        return
    import torch

    [needed] = mark.args
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs, and {torch.cuda.device_count()} are here")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a model of random weights and the starter model's tokenizer."""
    import torch
    from rllm_local.starter import starter_model
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(starter_model())
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **MODEL, **tokens)).save_pretrained(folder)
    return folder
