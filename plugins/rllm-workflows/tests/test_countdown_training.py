"""A model that was taught only the form of an answer learns ``countdown``."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from rllm_local.starter import starter_model
from rllm_workflows import countdown_warm_start
from rllm_workflows.countdown import CountdownConfig, CountdownWorkflow

EXAMPLES = Path(__file__).parents[2] / "rllm-local" / "examples"
ANSWER = re.compile(r"<answer>(\d+) ([-+*/]) (\d+)</answer>")


def test_the_warm_start_teaches_form_only():
    """Signs and orders are uniform for any target, and held-out tasks never occur."""
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


def solve_rates(rllm_core, example, run_dir, *overrides):
    """Returns the solve rate on 200 held-out tasks before and after training with an example of rllm-local."""
    options = [
        part for override in (f"model.path={starter_model(task='countdown')}", *overrides) for part in ("-o", override)
    ]
    rllm_core("train", EXAMPLES / example, "--run-dir", run_dir, *options)
    rllm_core("verify", run_dir)
    validations = json.loads((run_dir / "summary.json").read_text())["validation"]
    assert validations[0]["rollouts"] == validations[-1]["rollouts"] == 200
    return validations[0]["solved"], validations[-1]["solved"]


@pytest.mark.slow
def test_countdown_is_learned(rllm_core, tmp_path):
    """Runs the first steps only; chance moves a solve rate on 200 held-out tasks by about 0.03."""
    before, after = solve_rates(rllm_core, "countdown.toml", tmp_path / "run", "training.steps=80")
    assert 0 < before < 0.2
    assert after > before + 0.1


@pytest.mark.slow
@pytest.mark.by_hand
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("example", ["countdown.toml", "countdown-async.toml"])
def test_half_of_countdown_is_solved_on_every_seed(rllm_core, tmp_path, example, seed):
    before, after = solve_rates(rllm_core, example, tmp_path / "run", f"training.seed={seed}")
    print(f"{example}, seed {seed}: {before:.3f} -> {after:.3f}")
    assert 0 < before < 0.2
    assert after >= 0.5
