"""The backend as the trainer drives it."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rllm_local.backend import LocalBackend
from rllm_local.config import LocalConfig, LoRAConfig
from rllm_local.engine import LocalEngine
from rllm_local.model import compute_dtype, load_model, runs_on_gpu
from rllm_local.starter import starter_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllm_core.backend import OptimizerStep, PolicyUpdate
from rllm_core.config import (
    AlgorithmConfig,
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
)
from rllm_core.errors import RunError
from rllm_core.plugins import PluginManager
from rllm_core.types import SamplingParams, TokenOutput, TrainingSample

Build = Callable[..., RunConfig]


def local_backend(config: RunConfig) -> LocalBackend:
    return LocalBackend(config, PluginManager.from_environment(no_plugins=True))


@asynccontextmanager
async def started(config: RunConfig) -> AsyncIterator[tuple[LocalBackend, LocalEngine]]:
    backend = local_backend(config)
    try:
        engine = await backend.init_rollout_engine(None)  # type: ignore[arg-type]
        await backend.on_policy_updated(PolicyUpdate(0, 0, "start"))
        yield backend, engine
    finally:
        await backend.shutdown()


async def train(backend: LocalBackend, passes: Sequence[Sequence[TrainingSample]], step: int) -> dict[str, float]:
    for samples in passes:
        await backend.process_backend_batch(backend.transform_to_backend_batch(samples))
    everything = [sample for samples in passes for sample in samples]
    result = await backend.update_policy(
        OptimizerStep(
            step=step,
            total_steps=10,
            samples=len(everything),
            sampled_tokens=sum(sample.sampled_tokens for sample in everything),
            trajectories=len(everything),
        )
    )
    await backend.on_policy_updated(PolicyUpdate(step, step, "step"))
    return result.metrics


async def two_turns(
    engine: LocalEngine, temperature: float, prompts: int = 3, per_prompt: int = 4
) -> list[TrainingSample]:
    """Samples rollouts of two turns, with an observation between the turns."""
    params = SamplingParams(temperature=temperature, max_response_tokens=8, stop_token_ids=tuple(range(10, 60)))
    rng = np.random.default_rng(0)

    async def play(prompt: np.ndarray, first: TokenOutput, seed: int) -> TrainingSample:
        observed = np.concatenate([prompt, first.token_ids, rng.integers(10, 200, 3)]).astype(np.int32)
        second = await engine.get_token_output_from_token_input(observed, sampling_params=params, seed=seed)
        ids = np.concatenate([observed, second.token_ids])
        start = len(prompt)
        return TrainingSample(
            group_id=0,
            rollout_id=str(seed),
            token_ids=ids,
            turn_spans=((start, start + len(first.token_ids)), (len(observed), len(ids))),
            logprobs=np.concatenate([first.logprobs, second.logprobs]),  # type: ignore[list-item]
            advantages=rng.normal(size=len(first.token_ids) + len(second.token_ids)),
            weight_versions=(first.weight_version, second.weight_version),
        )

    samples: list[TrainingSample] = []
    for number in range(prompts):
        prompt = rng.integers(10, 200, 4 + 3 * number).astype(np.int32)
        seeds = [1000 * number + index for index in range(per_prompt)]
        firsts = await engine.get_token_outputs_from_token_input(prompt, sampling_params=params, seeds=seeds)
        turns = (play(prompt, first, seed + 500) for first, seed in zip(firsts, seeds, strict=True))
        samples += await asyncio.gather(*turns)
    return samples


def largest_difference(samples: Sequence[TrainingSample], logprobs: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(s.logprobs - l).max()) for s, l in zip(samples, logprobs, strict=True))  # noqa: E741


@pytest.mark.parametrize("packing", ["prefix", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
async def test_sampled_logprobs_equal_recomputed_ones(run_config: Build, packing: Any, temperature: float) -> None:
    """Checked before and after training, over two turns."""
    local = LocalConfig(device="cpu", packing=packing)
    async with started(run_config(local, rollout=RolloutConfig(temperature=temperature))) as (backend, engine):
        for step in (1, 2, 3):
            samples = await two_turns(engine, temperature)
            assert {s.weight_versions for s in samples} == {(step - 1, step - 1)}
            assert largest_difference(samples, await backend.compute_logprobs(samples)) < 1e-5
            metrics = await train(backend, [samples], step)
            assert metrics["rollout_logprob_difference_max"] < 1e-5


async def test_training_moves_the_policy_towards_what_was_rewarded(run_config: Build) -> None:
    async with started(run_config()) as (backend, engine):
        samples = await two_turns(engine, 1.0)
        praised = [s.model_copy(update={"advantages": np.ones_like(s.advantages)}) for s in samples]
        before = await backend.compute_logprobs(praised)
        for step in range(1, 6):
            await train(backend, [praised], step)
        after = await backend.compute_logprobs(praised)
        assert sum(a.sum() for a in after) > sum(b.sum() for b in before) + 10


def weights(backend: LocalBackend) -> dict[str, torch.Tensor]:
    assert backend._trainer is not None
    return {name: value.clone() for name, value in backend._trainer.model.state_dict().items()}


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4), LoRAConfig(target_modules=("q_proj", "embed_tokens"))])
async def test_a_resumed_run_equals_an_uninterrupted_one(
    run_config: Build, samples: list[TrainingSample], tmp_path: Path, lora: LoRAConfig | None
) -> None:
    config = run_config(
        LocalConfig(device="cpu", lora=lora),
        algorithm=AlgorithmConfig(entropy_coefficient=0.1, entropy_coefficient_final=0.0),
        optimizer=OptimizerConfig(learning_rate=1e-2, schedule="linear", weight_decay=0.1),
    )
    async with started(config) as (backend, _):
        for step in (1, 2):
            await train(backend, [samples], step)
        await backend.save_checkpoint(tmp_path)
        state = backend.state_dict()
        expected = [await train(backend, [samples], step) for step in (3, 4)]
        final = weights(backend)
    async with started(config) as (backend, engine):
        backend.load_state_dict(state)
        await backend.load_checkpoint(tmp_path)
        await backend.on_policy_updated(PolicyUpdate(2, 2, "resume"))
        assert engine.weight_version == 2
        assert [await train(backend, [samples], step) for step in (3, 4)] == expected
        resumed = weights(backend)
    assert resumed.keys() == final.keys()
    assert all(torch.equal(resumed[name], final[name]) for name in final)
    assert not any("pickle" in path.name or path.suffix in (".bin", ".pt", ".pkl") for path in tmp_path.iterdir())


async def test_a_checkpoint_is_an_ordinary_model_folder(
    run_config: Build, samples: list[TrainingSample], tmp_path: Path
) -> None:
    async with started(run_config()) as (backend, _):
        await train(backend, [samples], 1)
        await backend.save_checkpoint(tmp_path)
        expected = weights(backend)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template


async def test_a_full_disk_is_an_error_of_the_disk(run_config: Build, tmp_path: Path) -> None:
    """The core then names the file; safetensors' own error would be blamed on this plugin."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with started(run_config()) as (backend, _):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                await backend.save_checkpoint(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_a_checkpoint_of_another_model_is_refused(
    run_config: Build, samples: list[TrainingSample], tmp_path: Path
) -> None:
    async with started(run_config()) as (backend, _):
        await backend.save_checkpoint(tmp_path)
    async with started(run_config(LocalConfig(device="cpu", lora=LoRAConfig()))) as (backend, _):
        with pytest.raises(RunError, match="is from another model"):
            await backend.load_checkpoint(tmp_path)


async def test_accumulated_passes_equal_one_pass(run_config: Build, samples: list[TrainingSample]) -> None:
    results = []
    for passes in ([samples], [samples[:3], samples[3:9], samples[9:]]):
        async with started(run_config()) as (backend, _):
            metrics = await train(backend, passes, 1)
            results.append((metrics, weights(backend)))
    (one, one_weights), (many, many_weights) = results
    assert many == pytest.approx(one, rel=1e-5)
    # Adam's first step is a sign: if a gradient is only rounding error, so is its direction.
    close = torch.cat([(one_weights[n] - many_weights[n]).abs().flatten() < 1e-5 for n in one_weights])
    assert close.float().mean() > 0.99


async def test_stale_samples_with_proximal_logprobs_move_the_weights_as_fresh_ones_do(
    run_config: Build, samples: list[TrainingSample]
) -> None:
    """Before the first update, the ratio to the policy before the step is 1 for any sampling policy."""
    moved = []
    for algorithm in (AlgorithmConfig(), AlgorithmConfig(loss="ppo_clip", proximal_policy="forward")):
        async with started(run_config(algorithm=algorithm)) as (backend, _):
            given = samples
            if algorithm.proximal_policy == "forward":
                computed = await backend.compute_logprobs(samples, "proximal")
                given = [s.model_copy(update={"proximal_logprobs": c}) for s, c in zip(samples, computed, strict=True)]
            await train(backend, [given], 1)
            moved.append(weights(backend))
    close = torch.cat([(moved[0][n] - moved[1][n]).abs().flatten() < 1e-5 for n in moved[0]])
    assert close.float().mean() > 0.99


async def test_the_reference_policy_stays_where_it_was(run_config: Build, samples: list[TrainingSample]) -> None:
    for lora in (None, LoRAConfig(rank=2)):
        async with started(run_config(LocalConfig(device="cpu", lora=lora))) as (backend, _):
            before = await backend.compute_logprobs(samples)
            for step in (1, 2):
                await train(backend, [samples], step)
            reference = await backend.compute_logprobs(samples, "reference")
            current = await backend.compute_logprobs(samples, "current")
            proximal = await backend.compute_logprobs(samples, "proximal")
            assert all(np.abs(a - b).max() < 1e-6 for a, b in zip(before, reference, strict=True))
            assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(before, current, strict=True))
            assert all(np.array_equal(a, b) for a, b in zip(proximal, current, strict=True))


async def test_lora_trains_adapters_only_and_samples_from_them(run_config: Build) -> None:
    config = run_config(LocalConfig(device="cpu", lora=LoRAConfig(rank=4, target_modules=("q_proj", "down_proj"))))
    async with started(config) as (backend, engine):
        before = weights(backend)
        for step in (1, 2, 3):
            samples = await two_turns(engine, 1.0)
            assert largest_difference(samples, await backend.compute_logprobs(samples)) < 1e-5
            await train(backend, [samples], step)
        changed = {name for name, value in weights(backend).items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name and ("q_proj" in name or "down_proj" in name) for name in changed)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("generation", ["colocated", "separated"])
async def test_a_head_is_copied_only_if_it_changes_while_it_is_read(
    run_config: Build, generation: Any, lora: LoRAConfig | None
) -> None:
    local = LocalConfig(device="cpu", generation=generation, lora=lora)
    async with started(run_config(local)) as (backend, engine):
        for step in (1, 2):
            samples = await two_turns(engine, 1.0)
            assert largest_difference(samples, await backend.compute_logprobs(samples)) < 1e-5
            await train(backend, [samples], step)
        await two_turns(engine, 1.0)
        model, read = backend._allocated().model, engine._decoder.weights
        trained: Any = model.get_input_embeddings()
        assert read.head.data_ptr() == read.embedding.data_ptr()  # tied
        is_shared = generation == "colocated" or lora is not None
        assert (read.head.data_ptr() == trained.weight.data_ptr()) == is_shared


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4)], ids=["full", "lora"])
async def test_bfloat16_trains_float32_weights(run_config: Build, lora: LoRAConfig | None) -> None:
    async with started(run_config(LocalConfig(device="cpu", dtype="bfloat16", lora=lora))) as (backend, engine):
        samples = await two_turns(engine, 1.0)
        assert 0 < largest_difference(samples, await backend.compute_logprobs(samples)) < 0.5
        await train(backend, [samples], 1)
        trainer = backend._allocated()
        states = [state for each in trainer.optimizer.state.values() for state in each.values()]
        assert {value.dtype for value in [*trainer.parameters.values(), *states]} == {torch.float32}


async def test_the_engine_keeps_its_version_until_it_is_synchronised(
    run_config: Build, samples: list[TrainingSample]
) -> None:
    training = TrainingConfig(steps=10, groups_per_step=2, rollouts_per_group=4, trigger_parameter_sync_step=2)
    async with started(run_config(training=training)) as (backend, engine):
        params = SamplingParams(max_response_tokens=6)
        ask = {"sampling_params": params, "seed": 0}
        first = await engine.get_token_output_from_token_input([40, 41], **ask)  # type: ignore[arg-type]
        await backend.process_backend_batch(backend.transform_to_backend_batch(samples))
        await backend.update_policy(
            OptimizerStep(step=1, total_steps=2, samples=13, sampled_tokens=95, trajectories=13)
        )
        assert await engine.get_token_output_from_token_input([40, 41], **ask) == first  # type: ignore[arg-type]


async def test_the_entropy_bonus_falls_linearly(run_config: Build) -> None:
    algorithm = AlgorithmConfig(entropy_coefficient=0.4, entropy_coefficient_final=0.1)
    backend = local_backend(run_config(algorithm=algorithm, training=TrainingConfig(steps=4)))
    seen = []
    for step in range(5):
        backend.load_state_dict({"step": step})
        seen.append(backend._entropy_coefficient())
    assert seen == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.1])
    await backend.shutdown()


def torch_settings() -> tuple[int, str]:
    return torch.get_num_threads(), torch.get_float32_matmul_precision()


@pytest.mark.slow
async def test_torch_settings_are_put_back(run_config: Build) -> None:
    before = torch_settings()
    local = LocalConfig(device="cpu", threads=2, matmul_precision="medium")
    async with started(run_config(local)) as (backend, engine):
        assert await backend._in_worker(torch_settings) == (2, "medium")
        assert backend._trainer is not None
        assert backend._trainer.model.config._attn_implementation == "eager"
        samples = await two_turns(engine, 1.0)
        assert largest_difference(samples, await backend.compute_logprobs(samples)) < 0.05
    assert torch_settings() == before
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch_settings).result() == before


async def test_small_models_get_one_thread(run_config: Build) -> None:
    async with started(run_config()) as (backend, _):
        assert await backend._in_worker(torch_settings) == (1, "highest")


def test_threads_load_one_model_at_a_time(model_folder: Path) -> None:
    alone = load_model(model_folder, LocalConfig()).state_dict()
    together = threading.Barrier(8)

    def loaded() -> dict[str, torch.Tensor]:
        together.wait()
        return load_model(model_folder, LocalConfig()).state_dict()

    with ThreadPoolExecutor(8) as threads:
        for weights in [future.result() for future in [threads.submit(loaded) for _ in range(8)]]:
            assert all(torch.equal(weights[name], value) for name, value in alone.items())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no/such/folder/here", "there is no such folder, and it is not a Hugging Face model ID"),
        ("./missing", "there is no such folder"),
        ("{empty}", "it has no config.json"),
    ],
)
async def test_model_folders_are_checked(run_config: Build, tmp_path: Path, path: str, message: str) -> None:
    backend = local_backend(run_config(model=ModelConfig(path=path.format(empty=tmp_path))))
    with pytest.raises(ConfigError, match=message):
        backend.validate_config()
    await backend.shutdown()


async def test_hub_names_are_not_checked(run_config: Build) -> None:
    backend = local_backend(run_config(model=ModelConfig(path="owner/some-model")))
    (line,) = backend.validate_config()
    assert "owner/some-model" in line
    await backend.shutdown()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
async def test_a_missing_gpu_is_an_error(run_config: Build) -> None:
    backend = local_backend(run_config(LocalConfig(device="cuda")))
    with pytest.raises(ConfigError, match="torch finds no GPU here"):
        backend.validate_config()
    await backend.shutdown()


async def test_a_folder_without_a_causal_model_is_one_line(run_config: Build, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    backend = local_backend(run_config(model=ModelConfig(path=str(tmp_path))))
    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model") as caught:
        await backend.init_rollout_engine(None)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    await backend.shutdown()


@pytest.mark.parametrize("targets", [("nothing",), ("q_proj", "v_porj")])
async def test_lora_targets_that_do_not_exist(run_config: Build, targets: tuple[str, ...]) -> None:
    """peft ignores them if another target exists."""
    local = LocalConfig(device="cpu", lora=LoRAConfig(target_modules=targets))
    backend = local_backend(run_config(local))
    with pytest.raises(ConfigError, match=rf"local\.lora\.target_modules: the model has no layer '{targets[-1]}'; its"):
        await backend.init_rollout_engine(None)  # type: ignore[arg-type]
    await backend.shutdown()
    planned = local_backend(run_config(local, model=ModelConfig(path=str(starter_model()))))
    with pytest.raises(ConfigError, match="has no layer"):
        planned.validate_config()


def test_settings_and_promises_follow_the_device(run_config: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(local: LocalConfig) -> tuple[object, ...]:
        resolved = local.resolved(on_gpu=runs_on_gpu(local))
        is_deterministic = LocalBackend.capabilities(run_config(local)).deterministic
        return compute_dtype(local), resolved.gradient_checkpointing, is_deterministic

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert found(LocalConfig()) == (torch.float32, "off", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert found(LocalConfig()) == (torch.bfloat16, "on", False)
    assert found(LocalConfig(device="cuda:1")) == (torch.bfloat16, "on", False)
    assert found(LocalConfig(device="cpu")) == (torch.float32, "off", True)
    exact = LocalConfig(dtype="float32", gradient_checkpointing="off")
    assert found(exact) == (torch.float32, "off", False)


async def test_capabilities(run_config: Build) -> None:
    capabilities = LocalBackend.capabilities(run_config())
    assert capabilities.torch_losses
    assert capabilities.colocated
    assert capabilities.deferred_normalisation
    with pytest.raises(RunError, match="not been initialized"):
        local_backend(run_config()).transform_to_backend_batch([])
