"""Generation in its own thread: weights of samples, shutdown, failures and recovery."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import rllm_local
import rllm_renderers
import torch
from rllm_local import engine as engine_module
from rllm_local import model as model_module
from rllm_local.backend import LocalBackend
from rllm_local.config import LocalConfig, LoRAConfig
from rllm_local.engine import LocalEngine
from rllm_local.fused import FusedDecoder
from rllm_local.model import load_model, settings_for
from rllm_local.sampler import generate

from rllm_core import hookimpl
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.backend import OptimizerStep, PolicyUpdate
from rllm_core.config import RunConfig
from rllm_core.engine import Completer, EngineError
from rllm_core.errors import ConfigError
from rllm_core.plugins import PluginManager
from rllm_core.providers import WorkflowProvider
from rllm_core.run_folder import checkpoint
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_core.types import Episode, SamplingParams, Task, TokenOutput, TrainingSample
from rllm_core.workflow import Split, Workflow
from rllm_viewer.verify import verify

Build = Callable[..., RunConfig]
SEPARATED = LocalConfig(device="cpu", generation="separated")
PARAMS = SamplingParams(max_response_tokens=6)
GROUPS, ROLLOUTS = 2, 4
EXACT = 1e-4


# --------------------------------------------------------------------------------------------------------------------
# The backend, call by call


@asynccontextmanager
async def started(config: RunConfig) -> AsyncIterator[tuple[LocalBackend, LocalEngine]]:
    backend = LocalBackend(config, PluginManager.from_environment(no_plugins=True))
    try:
        engine = await backend.init_rollout_engine(None)  # type: ignore[arg-type]
        await backend.on_policy_updated(PolicyUpdate(0, 0, "start"))
        yield backend, engine
    finally:
        await backend.shutdown()


async def ask(engine: LocalEngine, *prompt: int, seed: int = 0) -> TokenOutput:
    return await engine.get_token_output_from_token_input(prompt, sampling_params=PARAMS, seed=seed)


async def train(backend: LocalBackend, samples: list[TrainingSample], step: int) -> dict[str, float]:
    await backend.process_backend_batch(backend.transform_to_backend_batch(samples))
    tokens = sum(sample.sampled_tokens for sample in samples)
    counts = {"samples": len(samples), "sampled_tokens": tokens, "trajectories": len(samples)}
    return (await backend.update_policy(OptimizerStep(step=step, total_steps=10, **counts))).metrics


def sample_of(prompt: list[int], output: TokenOutput, advantage: float = 1.0) -> TrainingSample:
    return TrainingSample(
        group_id=0,
        rollout_id="0",
        token_ids=np.array([*prompt, *output.token_ids]),
        turn_spans=((len(prompt), len(prompt) + len(output.token_ids)),),
        logprobs=output.logprobs,
        advantages=np.full(len(output.token_ids), advantage),
        weight_versions=(output.weight_version,),
    )


async def difference(backend: LocalBackend, prompt: list[int], output: TokenOutput) -> float:
    """Returns the largest difference between sampled log-probabilities and those of the current weights."""
    [recomputed] = await backend.compute_logprobs([sample_of(prompt, output)])
    assert output.logprobs is not None
    return float(np.abs(recomputed - output.logprobs).max())


async def test_weights_change_only_while_the_stream_of_sampling_is_idle(
    run_config: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: happened.append("wait for sampling"))
    training = SimpleNamespace(synchronize=lambda: happened.append("wait for training"))
    monkeypatch.setattr(torch.cuda, "stream", lambda chosen: nullcontext(happened.append("enter")))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: training)
    async with started(run_config(SEPARATED)) as (backend, engine):
        await ask(engine, 40)
        engine._stream = stream  # type: ignore[assignment]
        use = engine._decoder.use
        monkeypatch.setattr(engine._decoder, "use", lambda weights: (happened.append("use"), use(weights)))
        for version in (1, 2):
            await backend.on_policy_updated(PolicyUpdate(version, version, "sync"))
        assert (await ask(engine, 40)).weight_version == 2
        engine._stream = None
    assert happened == ["wait for training"] * 2 + ["enter", "wait for sampling", "use", "wait for sampling"]


async def test_weights_that_no_batch_has_used_are_overwritten(run_config: Build) -> None:
    async with started(run_config(SEPARATED)) as (backend, engine):
        await ask(engine, 40)
        await backend.on_policy_updated(PolicyUpdate(1, 1, "sync"))
        unused = engine._loaded
        weights: Any = backend._allocated().model.get_output_embeddings()
        with torch.no_grad():
            weights.weight.mul_(1.5)
        await backend.on_policy_updated(PolicyUpdate(2, 2, "sync"))
        assert unused is not None
        assert engine._loaded is not None
        assert engine._loaded[0].layers is unused[0].layers
        output = await ask(engine, 40)
        assert output.weight_version == 2
        assert await difference(backend, [40], output) < EXACT


class Halt:
    """Blocks the sampling thread in the middle of its first batch."""

    def __init__(self, engine: LocalEngine) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.steps = 0
        self._step = engine._decoder.step
        engine._decoder.step = self._counted_step  # type: ignore[method-assign]

    def _counted_step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 3:
            self.reached.set()
            assert self.go_on.wait(60)
        return self._step(tokens)


@pytest.mark.parametrize("kind", ["fused", "transformers", "lora"])
async def test_a_batch_keeps_the_weights_and_the_version_it_began_with(
    run_config: Build, samples: list[TrainingSample], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Training continues meanwhile; the next batch uses the new weights."""
    if kind != "fused":
        monkeypatch.setattr(FusedDecoder, "supports", staticmethod(lambda model: False))
    local = SEPARATED.model_copy(update={"lora": LoRAConfig(rank=4)}) if kind == "lora" else SEPARATED
    async with started(run_config(local)) as (backend, engine):
        untouched = await ask(engine, 40, 41)
        assert await difference(backend, [40, 41], untouched) < EXACT
        halt = Halt(engine)
        running = asyncio.create_task(ask(engine, 40, 41))
        await asyncio.to_thread(halt.reached.wait, 60)
        for step in (1, 2, 3):
            await train(backend, samples, step)
        update = asyncio.create_task(backend.on_policy_updated(PolicyUpdate(1, 3, "step")))
        next_one = asyncio.create_task(ask(engine, 40, 41))
        await asyncio.wait_for(update, 60)
        assert engine.weight_version == 1
        assert not running.done()
        halt.go_on.set()
        old, new = await asyncio.gather(running, next_one)
        assert (old.weight_version, new.weight_version) == (0, 1)
        assert old == untouched, "not one token was sampled from the new weights"
        assert await difference(backend, [40, 41], old) > 10 * EXACT
        assert await difference(backend, [40, 41], new) < EXACT


async def test_the_difference_to_rollouts_is_that_of_the_live_version(run_config: Build) -> None:
    """Tokens of older weights are reported separately; they differ because the policy has changed."""
    async with started(run_config(SEPARATED)) as (backend, engine):
        first = sample_of([40, 41], await ask(engine, 40, 41))
        metrics = await train(backend, [first], 1)
        assert metrics["rollout_logprob_difference_max"] < EXACT
        assert metrics["off_policy_log_ratio"] < EXACT

        metrics = await train(backend, [first], 2)  # The weights changed, but not their version.
        assert metrics["off_policy_log_ratio"] > EXACT
        assert "rollout_logprob_difference_max" not in metrics
        assert "off_policy_log_ratio/age_0" not in metrics

        await backend.on_policy_updated(PolicyUpdate(1, 2, "step"))
        fresh = sample_of([40, 42], await ask(engine, 40, 42))
        metrics = await train(backend, [first, fresh], 3)
        assert metrics["rollout_logprob_difference_max"] < EXACT
        assert metrics["off_policy_log_ratio/age_0"] < EXACT < metrics["off_policy_log_ratio/age_1"]


async def test_a_failing_batch_fails_its_requests_only(run_config: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(decoder: Any, requests: Any, device: torch.device, **options: Any) -> Any:
        if any(9 in request.prompt_ids for request in requests):
            raise RuntimeError("out of memory")
        return generate(decoder, requests, device, **options)

    monkeypatch.setattr(engine_module, "generate", broken)
    async with started(run_config(SEPARATED)) as (backend, engine):
        await backend.on_policy_updated(PolicyUpdate(1, 1, "step"))
        with pytest.raises(EngineError, match="RuntimeError: out of memory"):
            await ask(engine, 9)
        assert (await ask(engine, 40)).weight_version == 1


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rllm-local")]


async def test_shutdown_ends_both_workers_at_the_next_token(run_config: Build) -> None:
    async with started(run_config(SEPARATED)) as (_, engine):
        halt = Halt(engine)
        running = asyncio.create_task(ask(engine, 40))
        await asyncio.to_thread(halt.reached.wait, 60)
        assert len(workers()) == 2
        waiting = asyncio.create_task(ask(engine, 41))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.05, halt.go_on.set)
    assert workers() == []
    assert halt.steps == 3
    with pytest.raises(EngineError, match="Unwanted: stopped after 3 tokens"):
        await running
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(EngineError, match="is shut down"):
        await ask(engine, 40)


@pytest.mark.slow
async def test_both_workers_use_the_settings_and_put_them_back(run_config: Build) -> None:
    before = torch.get_num_threads()
    async with started(run_config(SEPARATED.model_copy(update={"threads": 2}))) as (backend, _):
        loop = asyncio.get_running_loop()
        threads = [
            await loop.run_in_executor(worker, torch.get_num_threads)
            for worker in (backend._worker, backend._sampling_worker)
        ]
        assert threads == [2, 2]
    assert torch.get_num_threads() == before


def test_large_models_share_the_threads(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(model_folder, SEPARATED)
    monkeypatch.setattr(model_module, "SMALL_MODEL_PARAMETERS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    given = {"matmul_precision": "highest"}
    assert settings_for(model, SEPARATED.model_copy(update=given)).threads == 4
    assert settings_for(model, LocalConfig(device="cpu", **given)).threads == 8  # type: ignore[arg-type]
    assert settings_for(model, SEPARATED.model_copy(update={**given, "threads": 3})).threads == 3


async def test_attention_of_cudnn_is_off_during_a_run(run_config: Build) -> None:
    assert torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    async with started(run_config(SEPARATED)):
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    assert torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


# --------------------------------------------------------------------------------------------------------------------
# Whole runs


class EvenTokens(Workflow):
    """Two turns; the reward is the share of the sampled tokens with an even id.

    Attributes:
        rollouts: Training rollouts that began.
        second_version: Set when version 1 is live, if rollouts are to wait for it.
    """

    name: ClassVar[str] = "even_tokens"
    rollouts: ClassVar[int] = 0
    second_version: ClassVar[asyncio.Event | None] = None

    def tasks(self, split: Split) -> list[Task]:
        return [Task(task_id=f"{split}-{letter}", data={"letter": letter}) for letter in "abcdef"]

    async def run(self, task: Task, completer: Completer) -> Episode:
        EvenTokens.rollouts += 1
        number = EvenTokens.rollouts
        messages: list[Any] = [{"role": "user", "content": task.data["letter"]}]
        steps = [await completer.complete(messages)]
        if self.second_version is not None and GROUPS * ROLLOUTS < number <= 2 * GROUPS * ROLLOUTS:
            await self.second_version.wait()
        else:
            await asyncio.sleep(0.001 * (number % 5))
        messages += [steps[0].response, {"role": "user", "content": "more"}]
        steps.append(await completer.complete(messages))
        tokens = np.concatenate([step.completion_ids for step in steps])
        return self.episode(task, steps, reward=float((tokens % 2 == 0).mean()))


class Plugin:
    @hookimpl
    def workflows(self) -> list[WorkflowProvider]:
        return [WorkflowProvider(name="even_tokens", load="even_tokens:EvenTokens", summary="Even tokens.")]

    @hookimpl
    async def on_policy_updated(self, update: PolicyUpdate) -> None:
        if update.version == 1 and EvenTokens.second_version is not None:
            EvenTokens.second_version.set()


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    monkeypatch.setitem(sys.modules, "even_tokens", sys.modules[__name__])  # pytest's name for it is not importable.
    monkeypatch.setattr(EvenTokens, "rollouts", 0)
    manager = PluginManager.from_environment(no_plugins=True)
    for name, plugin in (("local", rllm_local), ("renderers", rllm_renderers), ("even_tokens", Plugin())):
        manager.register(plugin, name)
    return manager


@pytest.fixture
def configured(plugins: PluginManager, model_folder: Path) -> Build:
    def build(*overrides: str) -> RunConfig:
        settings = {
            "model.path": model_folder,
            "local.device": "cpu",
            "local.generation": "separated",
            "training.steps": 5,
            "training.groups_per_step": GROUPS,
            "training.rollouts_per_group": ROLLOUTS,
            "training.validation_rollouts": 0,
            "training.trajectories_per_step": GROUPS * ROLLOUTS,
            "training.checkpoint_every_steps": 1,
            "training.keep_checkpoints": 100,
            "rollout.max_response_tokens": 6,
            "optimizer.learning_rate": 3e-3,
        }
        given = [f"{key}={value}" for key, value in settings.items()]
        return load_run_config("even_tokens", plugins, overrides=(*given, *overrides))

    return build


@pytest.fixture
def play(plugins: PluginManager) -> Callable[..., dict[str, Any]]:
    def run(config: RunConfig, run_dir: Path, resume: bool = False) -> dict[str, Any]:
        assembly = assemble(config, plugins)
        summary = asyncio.run(launch.train(assembly, run_dir, resume=resume, progress=Progress()))
        checked = verify(run_dir)
        assert checked.problems == []
        assert checked.max_staleness <= config.training.staleness_threshold
        assert workers() == []
        return summary

    return run


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def turns_by_version(run_dir: Path) -> dict[int, list[TrainingSample]]:
    """Returns every turn of the run's episodes as a sample, grouped by weight version."""
    found: dict[int, list[TrainingSample]] = {}
    for line in lines_of(run_dir / "trajectories.jsonl"):
        for trajectory in Episode.model_validate(line["episode"]).trajectories:
            for step in trajectory.steps:
                assert step.weight_version is not None
                sample = TrainingSample(
                    group_id=0,
                    rollout_id="0",
                    token_ids=np.concatenate([step.prompt_ids, step.completion_ids]),
                    turn_spans=((len(step.prompt_ids), len(step.prompt_ids) + len(step.completion_ids)),),
                    logprobs=step.logprobs,
                    advantages=np.zeros(len(step.completion_ids)),
                    weight_versions=(step.weight_version,),
                )
                found.setdefault(step.weight_version, []).append(sample)
    return found


async def difference_to_checkpoint(config: RunConfig, folder: Path, samples: list[TrainingSample]) -> float:
    async with started(config) as (backend, _):
        await backend.load_checkpoint(folder / "backend")
        recomputed = await backend.compute_logprobs(samples)
    pairs = zip(samples, recomputed, strict=True)
    return max(float(np.abs(sample.logprobs - values).max()) for sample, values in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(), ("local.lora.rank=2",)], ids=["full", "lora"])
def test_rollouts_in_flight_go_on_with_new_weights(
    configured: Build,
    play: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lora: tuple[str, ...],
) -> None:
    """Rollouts of the second step wait between their turns until version 1 is live."""
    monkeypatch.setattr(EvenTokens, "second_version", asyncio.Event())
    config = configured("training.staleness_threshold=1", "training.partial_rollout=true", *lora)
    summary = play(config, tmp_path / "run")
    assert summary["books"]["trained"] == 5 * GROUPS * ROLLOUTS
    mixed = 0
    for line in lines_of(tmp_path / "run" / "trajectories.jsonl"):
        for trajectory in Episode.model_validate(line["episode"]).trajectories:
            mixed += [step.weight_version for step in trajectory.steps] == [0, 1]
    assert mixed == GROUPS * ROLLOUTS

    first, second, *rest = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert first["rollout_logprob_difference_max"] < EXACT
    assert "off_policy_log_ratio/age_1" not in first
    assert second["staleness_max"] == 1
    assert second["rollout_logprob_difference_max"] < EXACT
    assert second["off_policy_log_ratio/age_1"] > EXACT
    assert all(row.get("rollout_logprob_difference_max", 0.0) < EXACT for row in rest)

    folders = {int(folder.name[5:]): folder for folder in checkpoint.complete(tmp_path / "run" / "checkpoints")}
    turns = turns_by_version(tmp_path / "run")
    assert len(turns) >= 3
    for version in sorted(turns.keys() - {0}):
        assert asyncio.run(difference_to_checkpoint(config, folders[version], turns[version])) < EXACT
    assert asyncio.run(difference_to_checkpoint(config, folders[1], turns[0])) > EXACT, "versions do differ"


@pytest.mark.slow
def test_drained_rollouts_have_one_version(
    configured: Build, play: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    play(configured("training.staleness_threshold=1"), tmp_path / "run")
    episodes = [Episode.model_validate(line["episode"]) for line in lines_of(tmp_path / "run" / "trajectories.jsonl")]
    assert len(episodes) == 5 * GROUPS * ROLLOUTS
    for episode in episodes:
        assert len({step.weight_version for step in episode.trajectories[0].steps}) == 1
    assert lines_of(tmp_path / "run" / "metrics.jsonl")[1]["staleness_max"] == 1


@pytest.mark.slow
def test_gradients_accumulate_while_groups_arrive(
    configured: Build, play: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    accumulate = "training.groups_per_forward_backward=1"
    summary = play(configured("training.staleness_threshold=1", accumulate), tmp_path / "run")
    assert summary["optimizer_steps"] == 5
    consumed = [e for e in lines_of(tmp_path / "run" / "events.jsonl") if e["event"] == "consume"]
    assert [len(event["groups"]) for event in consumed] == [1] * 5 * GROUPS


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint(
    configured: Build, play: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config = configured("training.staleness_threshold=1", "training.partial_rollout=true")
    play(config, tmp_path / "run")
    for folder in checkpoint.complete(tmp_path / "run" / "checkpoints")[2:]:
        shutil.rmtree(folder)
    summary = play(config, tmp_path / "run", resume=True)
    assert summary["resumed_from_step"] == 2
    assert summary["optimizer_steps"] == summary["weight_version"] == 5
    rows = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row.get("rollout_logprob_difference_max", 0.0) < EXACT for row in rows)


@pytest.mark.slow
def test_synchronous_training_learns_as_colocated_does(
    configured: Build, play: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    rewards = {}
    for generation in ("colocated", "separated"):
        config = configured(
            f"local.generation={generation}",
            "training.steps=25",
            "training.groups_per_step=4",
            "training.rollouts_per_group=8",
            "training.checkpoint_every_steps=0",
        )
        play(config, tmp_path / generation)
        rows = lines_of(tmp_path / generation / "metrics.jsonl")
        assert all(row["staleness_max"] == 0 for row in rows)
        assert all(row["rollout_logprob_difference_max"] < EXACT for row in rows)
        rewards[generation] = [row["reward_mean"] for row in rows]
    assert rewards["separated"][0] == pytest.approx(rewards["colocated"][0], abs=0.02)
    for curve in rewards.values():
        assert curve[0] < 0.6
        assert np.mean(curve[-3:]) > 0.85
    assert np.mean(rewards["separated"][-3:]) == pytest.approx(np.mean(rewards["colocated"][-3:]), abs=0.1)


@pytest.mark.parametrize("more", [(), ("training.partial_rollout=true",)], ids=["drained", "partial"])
def test_asynchronous_training_needs_it(configured: Build, plugins: PluginManager, more: tuple[str, ...]) -> None:
    asynchronous = ("training.staleness_threshold=1", *more)
    assert not assemble(configured(*asynchronous), plugins).backend.capabilities(configured()).colocated
    with pytest.raises(ConfigError, match=r"training\.staleness_threshold = 1\.0 must be 0: backend 'local' shares"):
        assemble(configured(*asynchronous, "local.generation=colocated"), plugins)


def test_what_it_promises(configured: Build) -> None:
    separated = LocalBackend.capabilities(configured())
    assert (separated.colocated, separated.deterministic, separated.streaming) == (False, False, True)
    colocated = LocalBackend.capabilities(configured("local.generation=colocated"))
    assert (colocated.colocated, colocated.deterministic) == (True, True)
