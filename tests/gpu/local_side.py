"""Checks of backend ``local`` on one device. ``plugins/rllm-local/tests/test_gpu_checks.py`` runs them on a CPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rllm_local import memory
from rllm_local.config import LocalConfig
from rllm_local.drawing import Rows
from rllm_local.engine import LocalEngine
from rllm_local.fused import FusedDecoder
from rllm_local.model import (
    autocast_dtype,
    compute_dtype,
    load_model,
    make_decoder,
    max_cache_positions,
    recompute_layers,
    settings_for,
)
from rllm_local.sampler import Request, generate
from rllm_local.training import LocalTrainer

from rllm_core.algorithms.aggregation import Aggregation
from rllm_core.builtin.losses import PPOClip
from rllm_core.config import OptimizerConfig
from rllm_core.types import Floats, SamplingParams, TokenOutput, TrainingSample

PROMPT_TOKENS = 24


class Side:
    """A model on a device, with its trainer and decoder. Sets what the backend sets in torch.

    Args:
        folder: Model.
        local: Settings; only the device has no default.
    """

    def __init__(self, folder: Path, local: LocalConfig) -> None:
        self.local = local
        self.model = load_model(folder, local)
        settings_for(self.model, local).apply()
        self.device = self.model.device
        config: Any = self.model.config
        self.vocabulary: int = config.vocab_size
        self.decoder = make_decoder(self.model, local, shares_weights=True)
        self.trainer = LocalTrainer(
            model=self.model,
            loss=PPOClip(),
            aggregation=Aggregation("token_mean"),
            temperature=1.0,
            optimizer_config=OptimizerConfig(learning_rate=1e-3),
            share_prefixes=True,
            max_batch_tokens=4096,
            autocast_dtype=autocast_dtype(local),
        )

    def requests(self, prompts: int, completions: int, tokens: int, **params: Any) -> list[Request]:
        """Returns random prompts with seeds."""
        options = SamplingParams(max_response_tokens=tokens, **params)
        drawn = np.random.default_rng(0).integers(300, self.vocabulary, (prompts, PROMPT_TOKENS)).astype(np.int32)
        seeds = np.arange(prompts * completions).reshape(prompts, completions)
        return [Request(ids, options, row.tolist()) for ids, row in zip(drawn, seeds, strict=True)]

    def sampled(self, requests: list[Request], *, tokens_ahead: int = 1) -> list[TokenOutput]:
        """Samples on the current stream."""
        found = generate(self.decoder, requests, self.device, tokens_ahead=tokens_ahead)
        self.decoder.release()
        return [completion for part in found for completion in part]

    def samples(self, requests: list[Request], completions: list[TokenOutput]) -> list[TrainingSample]:
        """Returns training samples of completions, half of them good and half bad."""
        prompts = [request.prompt_ids for request in requests for _ in request.seeds]
        return [
            TrainingSample(
                group_id=0,
                rollout_id=str(number),
                token_ids=np.concatenate([prompt, completion.token_ids]),
                turn_spans=((len(prompt), len(prompt) + len(completion.token_ids)),),
                logprobs=completion.logprobs,
                advantages=np.full(len(completion.token_ids), 1.0 - 2 * (number % 2), np.float32),
                weight_versions=(0,),
            )
            for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]

    def gradient(self, samples: list[TrainingSample]) -> torch.Tensor:
        """Runs one pass; returns its gradient, which is reset."""
        self.trainer.forward_backward(self.trainer.batch(samples, skip_zero_advantages=False), 0.01)
        gradients = [weight.grad for weight in self.trainer.parameters.values() if weight.grad is not None]
        found = torch.cat([gradient.flatten() for gradient in gradients])
        torch._foreach_zero_(gradients)
        return found

    @contextmanager
    def peak(self) -> Iterator[list[int]]:
        """Yields a list that afterwards has the largest memory beyond that of now in bytes; 0 on a CPU."""
        found: list[int] = []
        before = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        yield found
        found.append(torch.cuda.max_memory_allocated(self.device) - before if self.device.type == "cuda" else 0)


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the difference relative to the first."""
    return float((one - other).norm() / one.norm())


def sampler_and_trainer(side: Side, *, tokens: int = 64) -> dict[str, float]:
    """Returns how far the log-probabilities of sampling and training differ, per token."""
    requests = side.requests(4, 4, tokens)
    completions = side.sampled(requests)
    theirs = np.concatenate(side.trainer.logprobs(side.samples(requests, completions)))
    gaps: Floats = np.abs(np.concatenate([completion.logprobs for completion in completions]) - theirs)
    is_fused = isinstance(side.decoder, FusedDecoder)
    return {"mean": float(gaps.mean()), "largest": float(gaps.max()), "fused": is_fused}


def chunked_head(side: Side) -> dict[str, float]:
    """Returns how far the gradient of a head in chunks differs from that of one with all logits at once."""
    requests = side.requests(2, 2, 32)
    samples = side.samples(requests, side.sampled(requests))
    found = []
    for nodes in (10**6, 7):
        limits = dict.fromkeys(("CPU_CHUNK_LOGITS", "GPU_CHUNK_LOGITS"), nodes * side.vocabulary)
        with patch.multiple(memory, **limits):
            found.append((side.gradient(samples), torch.tensor(np.concatenate(side.trainer.logprobs(samples)))))
    (whole, its_logprobs), (chunked, logprobs) = found
    return {"gradient": relative(whole, chunked), "logprobs": float((its_logprobs - logprobs).abs().max())}


def recomputed_layers(side: Side) -> dict[str, float]:
    """Returns the peaks of a pass that keeps all activations and of one that computes layers again."""
    requests = side.requests(4, 8, 64)
    samples = side.samples(requests, side.sampled(requests))
    with side.peak() as kept:
        expected = side.gradient(samples)
    recompute_layers(side.model)
    with side.peak() as recomputed:
        found = side.gradient(samples)
    return {"gradient": relative(expected, found), "kept": kept[0], "recomputed": recomputed[0]}


def tokens_ahead(side: Side) -> float:
    """Returns the share of completions that are the same whether 1 or 16 tokens are sampled per copy to the host."""
    requests = side.requests(4, 4, 50)
    one, many = (side.sampled(requests, tokens_ahead=count) for count in (1, 16))
    return float(np.mean([np.array_equal(a.token_ids, b.token_ids) for a, b in zip(one, many, strict=True)]))


def with_and_without_graphs(side: Side) -> dict[str, Any]:
    """Compares completions with CUDA graphs, which branch and outgrow the cache, with those of the plain fused decoder.

    Returns the decoder's class, the share of equal completions, the mean difference of log-probabilities while tokens
    are the same, and how many times faster graphs are.
    """
    requests, usual = side.requests(4, 16, 300), side.decoder
    found, seconds = [], []
    for decoder in (usual, FusedDecoder(side.model, compute_dtype(side.local), shares_weights=True)):
        side.decoder = decoder
        side.sampled(requests, tokens_ahead=16)
        began = time.perf_counter()
        found.append(side.sampled(requests, tokens_ahead=16))
        seconds.append(time.perf_counter() - began)
    side.decoder = usual
    gaps, same = [], []
    for mine, theirs in zip(*found, strict=True):
        differs = np.flatnonzero(mine.token_ids != theirs.token_ids)
        until = int(differs[0]) if len(differs) else len(mine.token_ids)
        gaps.append(np.abs(mine.logprobs[:until] - theirs.logprobs[:until]))
        same.append(not len(differs))
    return {
        "decoder": type(usual).__name__,
        "same": float(np.mean(same)),
        "gap": float(np.concatenate(gaps).mean()),
        "faster": seconds[1] / seconds[0],
    }


def truncated_draws(device: str, vocabulary: int, rows: int = 16) -> float:
    """Returns the share of tokens that are the same as on the CPU, for the same logits, top-k and top-p."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    uniform = torch.rand(rows, 8, generator=generator, dtype=torch.float64)
    options: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 500, "top_p": 0.8}]
    same = []
    for each in options:
        params = [SamplingParams(max_response_tokens=1, **each)] * rows
        found = [
            Rows(params, torch.device(place)).sample(logits.to(place, copy=True), uniform.to(place))[0].cpu()
            for place in ("cpu", device)
        ]
        same.append((found[0] == found[1]).float().mean())
    return float(torch.stack(same).min())


def engine_of_its_own_thread(side: Side, limit_gb: float) -> tuple[LocalEngine, list[TokenOutput], int]:
    """Samples through an engine as in ``separated`` generation; returns it, its completions and the peak of memory."""
    local = side.local.model_copy(update={"max_cache_gb": limit_gb})
    [request] = side.requests(1, 64, 100)

    async def sample(engine: LocalEngine) -> Any:
        return await engine.get_token_outputs_from_token_input(
            request.prompt_ids, sampling_params=request.params, seeds=request.seeds
        )

    with ThreadPoolExecutor(1) as executor:
        engine = LocalEngine(
            side.decoder,
            None,
            executor,
            device=side.device,
            vocabulary_size=side.vocabulary,
            max_model_tokens=256,
            max_batch_rows=512,
            max_cache_positions=max_cache_positions(side.model, local),
        )
        with side.peak() as peak:
            outputs = asyncio.run(sample(engine))
    return engine, list(outputs), peak[0]
