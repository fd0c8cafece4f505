"""A model that was taught the format learns both roles in one run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def train(rllm_core):
    """``train(workflow, run_dir, overrides)``: trains; returns the path of the trained model."""

    def run(workflow, run_dir, overrides):
        options = [argument for key, value in overrides.items() for argument in ("-o", f"{key}={value}")]
        rllm_core("train", workflow, "--backend", "local", "--run-dir", run_dir, *options)
        [*_, newest] = sorted((run_dir / "checkpoints").iterdir())
        return newest / "backend"

    return run


def validations(run_dir):
    """The metrics of all episodes of the first validation and of the last."""
    by_step = {}
    for line in (run_dir / "trajectories.jsonl").read_text().splitlines():
        written = json.loads(line)
        if written["episode"]["is_validation"]:
            by_step.setdefault(written["step"], []).append(written["episode"])
    return by_step[min(by_step)], by_step[max(by_step)]


def mean(episodes, name):
    values = [episode["metrics"][name] for episode in episodes if name in episode["metrics"]]
    return sum(values) / len(values)


def insight(episodes):
    """How much more often than a blind pick the judge is right, where there is something to choose."""
    return mean(episodes, "judge_right_of_mixed") - mean(episodes, "right_share_of_mixed")


@pytest.fixture(scope="module")
def taught(train, tmp_path_factory):
    """A model that was taught the format of both roles, and nothing about the alphabet."""
    folder = tmp_path_factory.mktemp("taught")
    rows = [sys.executable, "-m", "rllm_workflows.solver_judge_warm_start", "--out", folder / "rows.jsonl"]
    subprocess.run(rows, check=True)
    settings = {"sft.train": folder / "rows.jsonl", "training.steps": 150, "optimizer.learning_rate": 3e-3}
    return train("sft", folder / "run", settings)


@pytest.fixture
def trained(train, rllm_core):
    """``trained(run_dir, overrides)``: the metrics of each optimizer step of a run that ``verify`` accepts."""

    def run(run_dir, overrides):
        train("solver_judge", run_dir, {"training.validation_rollouts": 480} | overrides)
        rllm_core("verify", run_dir)
        return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]

    return run


def test_each_step_trains_both_roles(taught, trained, tmp_path):
    small = {"training.steps": 2, "training.trajectories_per_step": 240, "training.validation_rollouts": 240}
    rows = trained(tmp_path / "run", {"model.path": taught} | small)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["segment_breaks"] == 0 and row["grad_norm"] > 0 for row in rows)
    first, last = validations(tmp_path / "run")
    for episodes in (first, last):
        assert len(episodes) == 240
        assert sum("judge_right_of_mixed" in episode["metrics"] for episode in episodes) > 50
    # The judges' rewards are 0 on average at the level of chance, and differ from each other.
    judged = [t["reward"] for episode in last for t in episode["trajectories"] if t["role"] == "judge"]
    assert max(judged) > 0 > min(judged)
    assert all({"reward_mean/solver", "reward_mean/judge"} <= row.keys() for row in rows)


@pytest.mark.by_hand
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_both_roles_are_learned_in_one_run(taught, trained, tmp_path, seed):
    """Margins, on held-out words: a judge within 0.1 of a blind pick becomes better than one by 0.15 or more.

    Solvers of which at most 0.4 are right become right in 0.65 of all cases; with one letter of four hidden, 0.75 is
    the best they can do.
    """
    settings = {
        "model.path": taught,
        "training.seed": seed,
        "training.validate_every_steps": 25,
        "training.trajectories_per_step": 480,
    }
    rows = trained(tmp_path / "run", settings)
    first, last = validations(tmp_path / "run")
    print(f"seed {seed}: solvers {mean(first, 'solvers_right'):.3f} -> {mean(last, 'solvers_right'):.3f}, ", end="")
    print(f"insight {insight(first):.3f} -> {insight(last):.3f}")
    assert abs(insight(first)) <= 0.1
    assert insight(last) >= 0.15
    assert mean(first, "solvers_right") <= 0.4
    assert mean(last, "solvers_right") >= 0.65
    assert rows[-1]["reward_mean/solver"] > rows[0]["reward_mean/solver"]
    assert rows[-1]["reward_mean/judge"] > rows[0]["reward_mean/judge"]
    assert all(row["segment_breaks"] == 0 for row in rows)
