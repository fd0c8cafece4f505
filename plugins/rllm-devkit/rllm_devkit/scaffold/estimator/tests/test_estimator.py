"""Tests of the estimator: contract and formula."""

from __future__ import annotations

import numpy as np
import pytest
from rllm_core.types import Step, Trajectory, TrajectoryGroup
from rllm_devkit.contracts import AdvantageEstimatorContract

from rllm_placeholder.estimator import PlaceholderEstimator


class TestContract(AdvantageEstimatorContract):
    """Runs each contract check as a test, with the default options."""

    name = "placeholder"


def advantages(rewards: list[float], **options: float) -> list[float]:
    step = Step(prompt_ids=[1], completion_ids=[2], logprobs=[-1.0], weight_version=0)
    group = TrajectoryGroup(
        group_id=0,
        task_id="a",
        trajectories=[Trajectory(steps=[step, step], reward=reward) for reward in rewards],
        rollout_ids=[str(place) for place in range(len(rewards))],
        weight_version=0,
    )
    [credits] = PlaceholderEstimator(options)([group])
    turns = np.array(credits)
    assert (turns[:, 0] == turns[:, 1]).all(), "both turns of a trajectory count alike"
    return list(turns[:, 0])


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0], [-1.0, 1.0]),
        ([0.0, 0.0, 1.0], [0.0, 0.0, 3.0]),
        ([0.1, 0.1, 0.1], [0.0, 0.0, 0.0]),
        ([1.0, 2.0, 3.0, 6.0], [-1.0, -1 / 3, 1 / 3, 7 / 3]),
    ],
)
def test_the_formula(rewards: list[float], expected: list[float]) -> None:
    assert advantages(rewards) == pytest.approx(expected)


def test_the_limit() -> None:
    assert advantages([0.0] * 9 + [1.0])[-1] == 3.0
    assert advantages([0.0, 1.0], limit=0.5) == [-0.5, 0.5]
