"""``countdown`` is learnt by a model that was taught the form of an answer, and nothing about the target."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import islice

import pytest
from rllm_local.starter import starter_model
from rllm_workflows import countdown_warm_start
from rllm_workflows.countdown import CountdownConfig, CountdownWorkflow

ANSWER = re.compile(r"<answer>(\d+) ([-+*/]) (\d+)</answer>")


def test_the_warm_start_teaches_form_only():
    """Signs and orders are uniform, whatever the target is; held-out tasks never occur."""
    tasks = CountdownWorkflow(CountdownConfig.model_validate(countdown_warm_start.SETTINGS))
    by_question = {task.data["question"]: task.data for task in tasks.tasks("train")}
    signs, orders = Counter(), Counter()
    for asked, answered in islice(countdown_warm_start.conversations(random.Random(0)), 4000):
        data = by_question[asked["content"]]
        left, sign, right = ANSWER.fullmatch(answered["content"]).groups()
        assert sorted([int(left), int(right)]) == sorted(data["nums"])
        right_sign = data["ground_truth"].split()[1]
        signs[right_sign == "+", sign] += 1
        orders[int(left) == data["nums"][0]] += data["nums"][0] != data["nums"][1]
    for is_sum in (True, False):
        total = sum(signs[is_sum, sign] for sign in "+-*/")
        assert all(0.21 < signs[is_sum, sign] / total < 0.29 for sign in "+-*/")
    assert 0.47 < orders[True] / orders.total() < 0.53


def trained(run_dir, steps, seed):
    """The share of held-out tasks solved before and after."""
    settings = {f"countdown.{key}": value for key, value in countdown_warm_start.SETTINGS.items()} | {
        "model.path": starter_model(task="countdown"),
        "training.seed": seed,
        "training.steps": steps,
        "training.groups_per_step": 32,
        "training.validate_every_steps": steps,
        "training.validation_rollouts": 200,
        "rollout.max_response_tokens": 16,
        "algorithm.entropy_coefficient": 0.02,
        "optimizer.learning_rate": 2e-3,
        "optimizer.final_learning_rate_fraction": 0.02,
    }
    options = [argument for key, value in settings.items() for argument in ("-o", f"{key}={value}")]
    command = [sys.executable, "-m", "rllm_core"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    train = [*command, "train", "countdown", "--backend", "local", "--run-dir", str(run_dir), *options]
    done = subprocess.run(train, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    verified = subprocess.run([*command, "verify", str(run_dir)], capture_output=True, text=True, env=environment)
    assert verified.returncode == 0, verified.stdout
    validations = json.loads((run_dir / "summary.json").read_text())["validation"]
    return validations[0]["solved"], validations[-1]["solved"]


@pytest.mark.slow
def test_countdown_is_learnt(tmp_path):
    """Chance moves a share of 200 held-out tasks by about 0.03."""
    before, after = trained(tmp_path / "run", steps=120, seed=0)
    assert 0 < before < 0.2
    assert after > before + 0.1
