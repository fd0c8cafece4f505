"""Adapters from the command line: a run that learns, what is exported from it, and its evaluation."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from in_process import run_in_process
from peft import PeftModel
from rllm_verl.export import command
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl_runs import ASYNCHRONOUS, GREATEST_GAP_LEARNT, Trained, verify

from rllm_core.types import Episode

STEPS = 30
# Required increase of the mean reward from the first 10 to the last 10 steps, set before the first run. Chance moves
# such a mean of 1280 rewards by about 0.01.
MARGIN = 0.1
MODES: dict[str, tuple[str, ...]] = {
    "colocated": (),
    "separated": (*ASYNCHRONOUS, "training.partial_rollout=true"),
}
SIZES = ("training.groups_per_step=8", "training.rollouts_per_group=16")
ADAPTERS = ("verl.lora.rank=8", "verl.sync_numbers_every=1", "optimizer.learning_rate=0.003")
VALIDATION = (
    "training.validation_rollouts=16",
    f"training.validate_every_steps={STEPS}",
    "training.trajectories_per_step=16",
)


def learned(path: Path, model: Path, mode: str, *overrides: str) -> Trained:
    """Trains, and checks that the reward rises and that every weight sync was proved."""
    run = Trained.here(path, model, f"training.steps={STEPS}", *SIZES, *ADAPTERS, *VALIDATION, *MODES[mode], *overrides)
    checked = verify(run.path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    metrics = run.lines("metrics")
    assert len(metrics) == STEPS
    assert all(line["sync_logprob_difference_max"] <= GREATEST_GAP_LEARNT for line in metrics)
    assert all(line["sync_tensors_compared"] > 0 for line in metrics)
    rewards = [line["reward_mean"] for line in metrics]
    print(f"{fmean(rewards[:10]):.3f} -> {fmean(rewards[-10:]):.3f}")
    assert fmean(rewards[-10:]) - fmean(rewards[:10]) > MARGIN, rewards
    oldest = max(line["staleness_max"] for line in metrics)
    assert oldest == 0 if mode == "colocated" else oldest >= 1
    return run


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return learned(tmp_path_factory.mktemp("lora") / "run", model, "colocated")


def test_the_starter_task_is_learned(run: Trained) -> None:
    assert run.summary()["status"] == "completed"


def test_the_starter_task_is_learned_from_servers_on_their_own_devices(model: Path, tmp_path: Path) -> None:
    assert learned(tmp_path / "run", model, "separated").summary()["status"] == "completed"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_and_seed_learns(model: Path, tmp_path: Path, mode: str, seed: int) -> None:
    """In ``make verl-seeds``."""
    learned(tmp_path / "run", model, mode, f"training.seed={seed}")


def says_what_the_servers_said(policy: torch.nn.Module, run: Trained) -> None:
    """Checks the log-probabilities of the last validation."""
    lines = [line for line in run.lines("trajectories") if line["step"] == STEPS]
    episodes = [Episode.model_validate(line["episode"]) for line in lines]
    steps = [step for each in episodes if each.is_validation for step in each.trajectories[0].steps]
    assert len(steps) == 16
    for step in steps:
        ids, prompt_tokens = torch.tensor([*step.prompt_ids, *step.completion_ids]), len(step.prompt_ids)
        with torch.no_grad():
            logprobs = policy(input_ids=ids[None]).logits[0, prompt_tokens - 1 : -1].log_softmax(-1)
        found = logprobs.gather(-1, ids[prompt_tokens:, None])[:, 0]
        np.testing.assert_allclose(found.numpy(), step.logprobs, rtol=0, atol=GREATEST_GAP_LEARNT)


def test_exported_adapters_say_what_the_servers_said(run: Trained, model: Path, tmp_path: Path) -> None:
    done = run_in_process(
        ["export-model", str(run.path), str(tmp_path / "adapters"), "--json"], folder=tmp_path, environment=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kind"] == "adapter"
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    says_what_the_servers_said(PeftModel.from_pretrained(base, str(tmp_path / "adapters")), run)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "adapters")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(model).get_vocab()


def test_exported_merged_weights_say_what_the_servers_said(run: Trained, tmp_path: Path) -> None:
    done = run_in_process(
        ["export-model", str(run.path), str(tmp_path / "merged"), "--merge"], folder=tmp_path, environment=os.environ
    )
    assert done.returncode == 0, done.stderr
    says_what_the_servers_said(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32), run)


def test_the_earlier_command_exports_the_same_adapters(run: Trained, tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(run.path), str(tmp_path / "adapters"), "--json"])
    assert result.exit_code == 0, result
    assert json.loads(result.stdout)["step"] == STEPS
    saved = sorted(run.path.glob("checkpoints/*/backend/adapter/adapter_model.safetensors"))[-1]
    assert (tmp_path / "adapters" / "adapter_model.safetensors").read_bytes() == saved.read_bytes()
    assert not (tmp_path / "adapters" / "config.json").exists()


def test_an_evaluation_reads_the_adapters_of_a_checkpoint(run: Trained) -> None:
    arguments = ["eval", "--checkpoint", str(run.path), "--tasks", "64", "--json"]
    done = run_in_process(arguments, folder=run.path, environment=os.environ)
    assert done.returncode == 0, done.stderr
    after = json.loads(done.stdout.splitlines()[-1])["reward_mean"]  # verl prints the servers' addresses first
    rewards = [line["reward_mean"] for line in run.lines("metrics")]
    print(f"evaluated: {after:.3f}; first 10 steps {fmean(rewards[:10]):.3f}")
    assert after > fmean(rewards[:10]) + MARGIN
