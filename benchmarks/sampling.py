"""Sampling speed: the engine of ``local`` against ``generate`` of transformers, in one process and one precision.

Both get the same set of distinct prompts and sample the same number of tokens at temperature 1 from the whole
vocabulary, without stop tokens. Ours also returns every token's log-probability.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rllm_local.config import LocalConfig
from rllm_local.engine import LocalEngine
from rllm_local.model import load_model, make_decoder, settings_for
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.trials import RawTrials
from rllm_core.types import SamplingParams

PROMPT_TOKENS = 32
NEW_TOKENS = 32
BATCHES = (8, 32, 128)
FIRST_ORDINARY_TOKEN = 16  # the starter model's special tokens come first

HALF_MILLION = Qwen3Config(
    vocab_size=512,
    hidden_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=224,
    max_position_embeddings=1024,
    initializer_range=0.1,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
"""Configuration of a Qwen3 with 0.5 million parameters."""


def make_random_model(folder: Path) -> Path:
    """Saves a randomly initialized model of `HALF_MILLION`."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        Qwen3ForCausalLM(HALF_MILLION).save_pretrained(folder)
    return folder


def measure(models: dict[str, Path], trials: RawTrials, count: int) -> None:
    """Alternates both samplers, trial by trial, for every model and batch."""
    config = LocalConfig(device="cpu", dtype="float32", threads=1)
    for name, path in models.items():
        model = load_model(path, config)
        settings_for(model, config).apply()
        for batch in BATCHES:
            vocabulary = range(FIRST_ORDINARY_TOKEN, model.config.vocab_size)
            prompts = np.random.default_rng(batch).choice(vocabulary, (batch, PROMPT_TOKENS)).astype(np.int32)
            with ThreadPoolExecutor(1) as executor:
                sides = {"core": _core(model, config, executor, prompts), "transformers": _transformers(model, prompts)}
                for sample in sides.values():
                    sample()
                for trial in range(count):
                    for side in list(sides)[:: 1 if trial % 2 == 0 else -1]:
                        wall, cpu = time.perf_counter(), time.process_time()
                        tokens = sides[side]()
                        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                        row = {"model": name, "parameters": model.num_parameters(), "batch": batch, "side": side}
                        row |= {"trial": trial, "tokens": tokens, "wall_seconds": wall, "cpu_seconds": cpu}
                        trials.add({"kind": "sampling", **row})


def _core(
    model: PreTrainedModel, config: LocalConfig, executor: ThreadPoolExecutor, prompts: np.ndarray[Any, Any]
) -> Callable[[], int]:
    engine = LocalEngine(
        make_decoder(model, config, shares_weights=True),
        None,
        executor,
        device=torch.device("cpu"),
        vocabulary_size=model.config.vocab_size,
        max_model_tokens=model.config.max_position_embeddings,
        max_batch_rows=config.max_batch_rows,
    )
    params = SamplingParams(max_response_tokens=NEW_TOKENS)

    async def sample() -> int:
        outputs = await asyncio.gather(
            *(
                engine.get_token_output_from_token_input(prompt, sampling_params=params, seed=seed)
                for seed, prompt in enumerate(prompts)
            )
        )
        return sum(len(output.token_ids) for output in outputs)

    return lambda: asyncio.run(sample())


def _transformers(model: PreTrainedModel, prompts: np.ndarray[Any, Any]) -> Callable[[], int]:
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.from_numpy(prompts.astype(np.int64))
    mask = torch.ones_like(ids)
    generate: Any = model.generate

    def sample() -> int:
        with torch.inference_mode():
            sequences = generate(
                input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=NEW_TOKENS
            )
        return int(sequences[:, ids.shape[1] :].numel())

    return sample
