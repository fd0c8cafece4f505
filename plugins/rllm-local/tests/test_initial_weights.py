"""Backends that start from the weights of another run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from rllm_local.backend import LocalBackend
from rllm_local.config import LocalConfig, LoRAConfig

from rllm_core.backend import OptimizerStep, PolicyUpdate
from rllm_core.config import AlgorithmConfig, ConfigError, KLConfig, RunConfig
from rllm_core.errors import RunError
from rllm_core.plugins import PluginManager
from rllm_core.types import Floats, TrainingSample

Build = Callable[..., RunConfig]
LORA = LoRAConfig(rank=4, alpha=8.0)
ADAPTERS = LocalConfig(device="cpu", lora=LORA)
OF_EMBEDDING = LoRAConfig(rank=4, alpha=8.0, target_modules=("q_proj", "embed_tokens"))
KINDS = pytest.mark.parametrize(
    "local",
    [LocalConfig(device="cpu"), ADAPTERS, LocalConfig(device="cpu", lora=OF_EMBEDDING)],
    ids=["full", "lora", "lora_of_embedding"],
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "backend"
    folder.mkdir()
    return folder


def local_backend(config: RunConfig) -> LocalBackend:
    return LocalBackend(config, PluginManager.from_environment(no_plugins=True))


async def train(backend: LocalBackend, samples: list[TrainingSample], step: int) -> None:
    await backend.process_backend_batch(backend.transform_to_backend_batch(samples))
    counts = {"sampled_tokens": sum(sample.sampled_tokens for sample in samples), "trajectories": len(samples)}
    await backend.update_policy(OptimizerStep(step=step, total_steps=10, samples=len(samples), **counts))
    await backend.on_policy_updated(PolicyUpdate(step, step, "step"))


async def trained(config: RunConfig, samples: list[TrainingSample], folder: Path) -> list[Floats]:
    """Trains two steps and saves them; returns the log-probabilities."""
    backend = local_backend(config)
    try:
        await backend.init_rollout_engine(None)  # type: ignore[arg-type]
        for step in (1, 2):
            await train(backend, samples, step)
        await backend.save_checkpoint(folder)
        return await backend.compute_logprobs(samples)
    finally:
        await backend.shutdown()


def difference(ones: Sequence[Floats], others: Sequence[Floats]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(ones, others, strict=True))


async def begun(backend: LocalBackend, folder: Path) -> None:
    await backend.init_rollout_engine(None)  # type: ignore[arg-type]
    await backend.load_weights(folder)
    await backend.on_policy_updated(PolicyUpdate(0, 0, "start"))


@KINDS
async def test_weights_are_loaded_and_the_optimizer_is_new(
    run_config: Build, samples: list[TrainingSample], saved: Path, local: LocalConfig
) -> None:
    expected = await trained(run_config(local), samples, saved)
    (saved / "optimizer.safetensors").unlink()
    backend = local_backend(run_config(local))
    try:
        await begun(backend, saved)
        assert difference(await backend.compute_logprobs(samples), expected) == 0
        trainer = backend._allocated()
        assert not trainer.optimizer.state
        assert backend.state_dict()["step"] == 0
    finally:
        await backend.shutdown()


@KINDS
@pytest.mark.parametrize("coefficient", [0.0, 0.1])
async def test_the_reference_has_the_initial_weights(
    run_config: Build, samples: list[TrainingSample], saved: Path, local: LocalConfig, coefficient: float
) -> None:
    expected = await trained(run_config(local), samples, saved)
    algorithm = AlgorithmConfig(kl=KLConfig(coefficient=coefficient, place="reward"))
    backend = local_backend(run_config(local, algorithm=algorithm))
    try:
        await begun(backend, saved)
        assert difference(await backend.compute_logprobs(samples, "reference"), expected) == 0
        await train(backend, samples, 1)
        current = await backend.compute_logprobs(samples)
        assert difference(current, expected) > 1e-3
        assert difference(await backend.compute_logprobs(samples, "reference"), expected) == 0
        assert difference(await backend.compute_logprobs(samples), current) == 0
    finally:
        await backend.shutdown()


@KINDS
async def test_a_resumed_run_has_the_same_reference(
    run_config: Build, samples: list[TrainingSample], saved: Path, tmp_path: Path, local: LocalConfig
) -> None:
    expected = await trained(run_config(local), samples, saved)
    own = tmp_path / "own"
    own.mkdir()
    backend = local_backend(run_config(local))
    try:
        await begun(backend, saved)
        await train(backend, samples, 1)
        await backend.save_checkpoint(own)
        current = await backend.compute_logprobs(samples)
    finally:
        await backend.shutdown()
    resumed = local_backend(run_config(local))
    try:
        await resumed.init_rollout_engine(None)  # type: ignore[arg-type]
        await resumed.load_weights(saved)
        await resumed.load_checkpoint(own)
        assert difference(await resumed.compute_logprobs(samples), current) == 0
        assert difference(await resumed.compute_logprobs(samples, "reference"), expected) == 0
    finally:
        await resumed.shutdown()


@pytest.mark.parametrize(
    ("before", "now", "both"),
    [
        (None, LORA, ("all weights", "adapters of rank 4 and alpha 8")),
        (LORA, None, ("adapters of rank 4 and alpha 8", "all weights")),
        (LORA, LoRAConfig(rank=2, alpha=8.0), ("rank 4", "rank 2")),
        (LORA, LoRAConfig(rank=4, alpha=16.0), ("alpha 8", "alpha 16")),
        (
            LORA,
            LoRAConfig(rank=4, alpha=8.0, target_modules=("q_proj",)),
            ("14 modules (down_proj, ", "2 modules (q_proj);"),
        ),
        (
            OF_EMBEDDING,
            LoRAConfig(rank=4, alpha=8.0, target_modules=("q_proj",)),
            ("3 modules (embed_tokens, q_proj)", "2 modules (q_proj);"),
        ),
    ],
)
async def test_other_adapters_are_refused_with_both(
    run_config: Build,
    samples: list[TrainingSample],
    saved: Path,
    before: LoRAConfig | None,
    now: LoRAConfig | None,
    both: tuple[str, str],
) -> None:
    await trained(run_config(LocalConfig(device="cpu", lora=before)), samples, saved)
    backend = local_backend(run_config(LocalConfig(device="cpu", lora=now)))
    try:
        await backend.init_rollout_engine(None)  # type: ignore[arg-type]
        untouched = await backend.compute_logprobs(samples)
        with pytest.raises(ConfigError) as refused:
            await backend.load_weights(saved)
        assert all(words in str(refused.value) for words in both), str(refused.value)
        assert "\n" not in str(refused.value)
        assert difference(await backend.compute_logprobs(samples), untouched) == 0
    finally:
        await backend.shutdown()


async def test_adapters_of_another_base_model_are_refused(
    run_config: Build, samples: list[TrainingSample], saved: Path
) -> None:
    await trained(run_config(ADAPTERS), samples, saved)
    file = saved / "adapter_config.json"
    known = json.loads(file.read_text())
    assert Path(known["base_model_name_or_path"]).name == Path(run_config().model.path).name
    file.write_text(json.dumps({**known, "base_model_name_or_path": "/models/another"}))
    backend = local_backend(run_config(ADAPTERS))
    try:
        await backend.init_rollout_engine(None)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="for /models/another"):
            await backend.load_weights(saved)
    finally:
        await backend.shutdown()


async def test_weights_of_another_shape_are_refused(
    run_config: Build, samples: list[TrainingSample], saved: Path
) -> None:
    await trained(run_config(), samples, saved)
    from safetensors.torch import load_file, save_file

    weights = load_file(saved / "model.safetensors")
    name = next(name for name, value in weights.items() if value.dim() == 2)
    weights[name] = torch.zeros(3, 3)
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    backend = local_backend(run_config())
    try:
        await backend.init_rollout_engine(None)  # type: ignore[arg-type]
        with pytest.raises(RunError, match="is from another model"):
            await backend.load_weights(saved)
    finally:
        await backend.shutdown()
