"""The engine that samples from the weights the run started from, while others are trained."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from rllm_local.backend import LocalBackend
from rllm_local.config import LocalConfig, LoRAConfig
from rllm_local.engine import LocalEngine

from rllm_core.backend import OptimizerStep, PolicyUpdate
from rllm_core.config import RunConfig
from rllm_core.engine import EngineError
from rllm_core.plugins import PluginManager
from rllm_core.types import SamplingParams, TokenOutput, TrainingSample

Build = Callable[..., RunConfig]
LORA = LoRAConfig(rank=4, alpha=8.0)
PROMPTS = ((5, 6, 7), (9, 8, 7, 6))
EACH = pytest.mark.parametrize(
    "local",
    [
        LocalConfig(device="cpu"),
        LocalConfig(device="cpu", lora=LORA),
        LocalConfig(device="cpu", generation="separated"),
    ],
    ids=["full", "lora", "separated"],
)


@asynccontextmanager
async def started(config: RunConfig, initial: Path | None = None) -> AsyncIterator[tuple[LocalBackend, LocalEngine]]:
    """Yields a backend at the start of a run, and its reference engine."""
    backend = LocalBackend(config, PluginManager.from_environment(no_plugins=True))
    try:
        await backend.init_rollout_engine(None)  # type: ignore[arg-type]
        reference = await backend.init_reference_engine()
        if initial is not None:
            await backend.load_weights(initial)
        await backend.on_policy_updated(PolicyUpdate(0, 0, "start"))
        yield backend, reference
    finally:
        await backend.shutdown()


async def train(backend: LocalBackend, samples: list[TrainingSample], steps: int = 2) -> None:
    for step in range(1, steps + 1):
        await backend.process_backend_batch(backend.transform_to_backend_batch(samples))
        counts = {"sampled_tokens": sum(sample.sampled_tokens for sample in samples), "trajectories": len(samples)}
        await backend.update_policy(OptimizerStep(step=step, total_steps=10, samples=len(samples), **counts))
        await backend.on_policy_updated(PolicyUpdate(step, step, "step"))


async def said(engine: LocalEngine | None) -> list[TokenOutput]:
    assert engine is not None
    params = SamplingParams(max_response_tokens=8)
    return [
        await engine.get_token_output_from_token_input(prompt, sampling_params=params, seed=seed)
        for seed, prompt in enumerate(PROMPTS)
    ]


def is_same(ones: list[TokenOutput], others: list[TokenOutput]) -> bool:
    """Whether two engines said the same, with the same log-probabilities to the last bit."""
    return all(
        one.token_ids.tolist() == other.token_ids.tolist() and np.array_equal(one.logprobs, other.logprobs)
        for one, other in zip(ones, others, strict=True)
    )


@EACH
async def test_training_does_not_change_it(
    run_config: Build, samples: list[TrainingSample], local: LocalConfig
) -> None:
    async with started(run_config(local)) as (backend, reference):
        at_start = await said(backend._engine)
        assert is_same(await said(reference), at_start)
        await train(backend, samples)
        assert not is_same(await said(backend._engine), at_start)
        assert is_same(await said(reference), at_start)
        assert {output.weight_version for output in await said(reference)} == {0}


@EACH
async def test_it_has_the_weights_of_another_run_also_after_a_resume(
    run_config: Build, samples: list[TrainingSample], tmp_path: Path, local: LocalConfig
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    async with started(run_config(local)) as (backend, reference):
        before = await said(reference)
        await train(backend, samples)
        await backend.save_checkpoint(first)
        at_start = await said(backend._engine)
    async with started(run_config(local), initial=first) as (backend, reference):
        assert is_same(await said(reference), at_start)
        assert not is_same(at_start, before)
        await train(backend, samples)
        await backend.save_checkpoint(second)
        assert is_same(await said(reference), at_start)
        trained = await said(backend._engine)
    async with started(run_config(local), initial=first) as (backend, reference):
        await backend.load_checkpoint(second)
        await backend.on_policy_updated(PolicyUpdate(2, 2, "resume"))
        assert is_same(await said(backend._engine), trained)
        assert is_same(await said(reference), at_start)


async def test_it_can_be_made_after_a_checkpoint_was_loaded(
    run_config: Build, samples: list[TrainingSample], tmp_path: Path
) -> None:
    async with started(run_config()) as (backend, reference):
        at_start = await said(reference)
        await train(backend, samples)
        await backend.save_checkpoint(tmp_path)
    backend = LocalBackend(run_config(), PluginManager.from_environment(no_plugins=True))
    try:
        await backend.init_rollout_engine(None)  # type: ignore[arg-type]
        await backend.load_checkpoint(tmp_path)
        assert is_same(await said(await backend.init_reference_engine()), at_start)
    finally:
        await backend.shutdown()


async def test_it_ends_with_the_backend(run_config: Build) -> None:
    async with started(run_config()) as (_, reference):
        pass
    with pytest.raises(EngineError, match="shut down"):
        await said(reference)
