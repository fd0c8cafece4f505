"""Training on the starter task through the command line, with real verl, vLLM, weight syncs and kills."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
import torch
from sorting_agent import check_agent, written_agent
from transformers import AutoModelForCausalLM
from verl_runs import ASYNCHRONOUS, GREATEST_GAP_LEARNT, RUN_SECONDS, WITH_WORKER_PROCESSES, Run, verify

from rllm_core.assembly.resolution import load_run_config
from rllm_core.plugins import PluginManager
from rllm_core.providers import BackendProvider
from rllm_core.run_folder import checkpoint
from rllm_core.types import Episode

RAY = Path(sys.executable).with_name("ray")
GREATEST_GAP = 1e-5
STEPS = 40
# Required increase of the mean reward from the first 10 to the last 10 steps. Chance moves such a mean of 1280 rewards
# by about 0.01.
MARGIN = 0.1
COLOCATED: tuple[str, ...] = ()
HOT = (*ASYNCHRONOUS, "training.partial_rollout=true")
MODES = {"asynchronous": HOT, "colocated": COLOCATED}


def complete(run: Run, steps: int) -> list[dict[str, float]]:
    """Metrics of a completed run, after checks that every run must pass."""
    assert run.wait() == 0, run.printed()
    checked = verify(run.path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert run.summary()["status"] == "completed"
    metrics = run.lines("metrics")
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    for line in metrics:
        assert line["sync_logprob_difference_max"] <= (GREATEST_GAP if line["step"] == 1 else GREATEST_GAP_LEARNT)
        assert line["grad_norm"] > 0
    return metrics


@pytest.mark.parametrize("mode", ["colocated", pytest.param("asynchronous", marks=pytest.mark.slow)])
def test_countdown_is_learned_over_a_dead_server_a_kill_and_a_stop(
    model_for_countdown: Path, tmp_path: Path, mode: str
) -> None:
    """By a model that knows only the format. Chance moves the solve rate of 200 held-out tasks by about 0.03.

    Kills the server, then the driver, then asks the run to stop. Each resumed run continues exactly after the last
    checkpoint.
    """
    steps = 40
    settings = {
        "countdown.numbers": 2,
        "countdown.largest": 50,
        "countdown.largest_target": 100,
        "countdown.train_tasks": 1500,
        "countdown.validation_tasks": 200,
        "rollout.max_response_tokens": 16,
        "rollout.max_consecutive_failures": 16,
        "training.steps": steps,
        "training.checkpoint_every_steps": 1,
        "training.rollouts_per_group": 16,
        "training.validation_rollouts": 200,
        "training.validate_every_steps": steps,
        "optimizer.learning_rate": 2e-3,
    }
    options = [f"{key}={value}" for key, value in settings.items()]
    path = tmp_path / "run"
    run = Run.start(path, model_for_countdown, *options, *MODES[mode], workflow="countdown")
    run.wait_for_step(2)
    run.kill_one("VLLM::EngineCore")
    assert run.wait() == 1, run.printed()
    assert "a vLLM server died" in run.printed()
    assert run.summary()["status"] != "completed"

    run = Run.resume(path)
    done = len(run.lines("metrics"))
    assert done >= 1
    run.wait_for_step(done + 1)
    run.kill()

    run = Run.resume(path)
    run.wait_for_step(len(run.lines("metrics")) + 1)
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM, run.printed()
    assert run.summary()["status"] == "interrupted"

    run = Run.resume(path)
    metrics = complete(run, steps)
    assert "4 launches" in verify(path).stdout
    before, after = (validation["solved"] for validation in run.summary()["validation"])
    print(f"{before:.3f} -> {after:.3f}")
    assert before > 0
    assert after > before + 0.1
    oldest = max(line["staleness_max"] for line in metrics)
    if mode == "colocated":
        assert [line["weight_version"] for line in metrics] == list(range(1, steps + 1))
        assert oldest == 0
    else:
        assert oldest >= 1


def test_an_agent_in_actors_of_the_same_ray_is_trained_while_weights_are_synced(model: Path, tmp_path: Path) -> None:
    options = ("training.steps=4", *HOT, "rollout.host=ray", "rollout.workers=2")
    run = Run.start(tmp_path / "run", model, *options, workflow=str(written_agent(tmp_path, "verl")))
    run.wait_for_step(1)
    assert len(run.processes("rllm_core.hosts.worker")) == 2
    metrics = complete(run, 4)
    check_agent(metrics)
    assert max(line["staleness_max"] for line in metrics) >= 1
    assert run.summary()["rollout_host"]["where"] == "2 Ray workers"
    assert run.summary()["rollout_host"]["restarts"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_the_starter_task_is_learned(model: Path, tmp_path: Path, mode: str, seed: int) -> None:
    """In ``make verl-seeds``; ``make test-verl`` trains countdown until it is learned, and this task for few steps."""
    sizes = ("training.groups_per_step=8", "training.rollouts_per_group=16")
    overrides = (f"training.steps={STEPS}", f"training.seed={seed}", *sizes, *MODES[mode])
    run = Run.start(tmp_path / "run", model, *overrides)
    metrics = complete(run, STEPS)
    rewards = [line["reward_mean"] for line in metrics]
    print(f"seed {seed}: {fmean(rewards[:10]):.3f} -> {fmean(rewards[-10:]):.3f}")
    assert fmean(rewards[-10:]) - fmean(rewards[:10]) > MARGIN, rewards
    oldest = max(line["staleness_max"] for line in metrics)
    assert oldest == 0 if mode == "colocated" else oldest >= 1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Ray cluster that the run did not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    host, _, port = address.partition(":")
    options = [f"--node-ip-address={host}", f"--port={port}", "--num-gpus=2", "--num-cpus=32"]
    log = tmp_path_factory.mktemp("cluster") / "cluster.log"
    with log.open("wb") as output:
        head = subprocess.Popen([RAY, "start", "--head", "--block", *options], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + RUN_SECONDS
        while b"Ray runtime started" not in log.read_bytes():
            assert head.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield address
    finally:
        head.terminate()
        head.wait(RUN_SECONDS)


@pytest.fixture(scope="module")
def drained(model: Path, cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A completed run in that cluster, which waits for all rollouts before each weight sync.

    Its server computes in a worker process, as on GPUs.
    """
    options = ("training.steps=5", "training.partial_rollout=false", f"verl.ray_address={cluster}")
    kept = ("training.validation_rollouts=16", "training.trajectories_per_step=16", "training.validate_every_steps=5")
    run = Run.start(
        tmp_path_factory.mktemp("drained") / "run", model, *ASYNCHRONOUS, WITH_WORKER_PROCESSES, *options, *kept
    )
    assert run.wait() == 0, run.printed()
    return run


def test_in_somebody_elses_cluster_drained_before_each_sync(drained: Run) -> None:
    metrics = complete(drained, 5)
    assert max(line["staleness_max"] for line in metrics) >= 1


def test_an_export_gives_the_log_probabilities_of_the_last_validation(drained: Run, tmp_path: Path) -> None:
    """With float32 weights, because the run computed in float32."""
    plugins = PluginManager.from_environment()
    config = load_run_config(str(drained.path / "run.toml"), plugins)
    [*_, saved] = checkpoint.complete(drained.path / "checkpoints")
    provided = plugins.select(BackendProvider, "verl")
    plugins.load(provided, provided.record.export)(saved / "backend", config, tmp_path)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert policy.dtype == torch.float32
    episodes = [Episode.model_validate(line["episode"]) for line in drained.lines("trajectories") if line["step"] == 5]
    steps = [step for e in episodes if e.is_validation for step in e.trajectories[0].steps]
    assert len(steps) == 16
    for step in steps:
        ids, prompt_tokens = torch.tensor([*step.prompt_ids, *step.completion_ids]), len(step.prompt_ids)
        with torch.no_grad():
            logprobs = policy(ids[None]).logits[0, prompt_tokens - 1 : -1].log_softmax(-1)
        found = logprobs.gather(-1, ids[prompt_tokens:, None])[:, 0]
        torch.testing.assert_close(found, torch.tensor(step.logprobs), rtol=0, atol=GREATEST_GAP_LEARNT)
