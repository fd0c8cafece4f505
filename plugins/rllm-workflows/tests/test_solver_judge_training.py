"""Both roles are learnt by a model that was taught the format: the judge first, then both."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.by_hand]


def run(*command):
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr


def train(workflow, run_dir, overrides):
    """The path of the trained model."""
    options = [argument for key, value in overrides.items() for argument in ("-o", f"{key}={value}")]
    run("rllm_core", "train", workflow, "--backend", "local", "--run-dir", str(run_dir), *options)
    [*_, newest] = sorted((run_dir / "checkpoints").iterdir())
    return newest / "backend"


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


def test_both_roles_are_learnt(tmp_path):
    """Margins, set before: a judge within 0.1 of a blind one becomes better than it by 0.15 and more.

    Solvers of whom at most 0.4 are right become right in 0.9 of all cases, and the picked answer with them. All of it
    is measured on held-out words.
    """
    rows = tmp_path / "rows.jsonl"
    run("rllm_workflows.solver_judge_warm_start", "--out", str(rows))
    taught = train(
        "sft", tmp_path / "taught", {"sft.train": rows, "training.steps": 150, "optimizer.learning_rate": 3e-3}
    )
    both = {"training.trajectories_per_step": 512}
    chosen = {**both, "model.path": taught, "solver_judge.train": "judge", "training.steps": 200}
    judged = train("solver_judge", tmp_path / "judge", chosen)
    first, last = validations(tmp_path / "judge")
    assert abs(insight(first)) <= 0.1
    assert insight(last) >= 0.15
    assert mean(first, "solvers_right") <= 0.4

    train("solver_judge", tmp_path / "both", {**both, "model.path": judged, "training.steps": 60})
    first, last = validations(tmp_path / "both")
    assert mean(first, "solvers_right") <= 0.4
    assert mean(last, "solvers_right") >= 0.9
    assert sum(episode["is_correct"] for episode in last) / len(last) >= 0.9
    rows = [json.loads(line) for line in (tmp_path / "both" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["reward_mean/solver"] > rows[0]["reward_mean/solver"]
    assert all(row["segment_breaks"] == 0 for row in rows)
