"""Tests that a rollout has the reward that its agent got, however many conversations it had."""

from __future__ import annotations

from typing import Literal

import pytest
from conftest import Policy, rollout

from rllm_core.types import Task


@pytest.mark.parametrize("by", ["model", "conversation"])
async def test_the_reward_of_a_rollout_does_not_grow_with_its_conversations(
    by: Literal["model", "conversation"],
) -> None:
    async with rollout(Policy(lambda prompt, seed: "yes")) as client:
        for model in ("planner", "writer", "writer"):
            await client.ask([{"role": "user", "content": f"ask the {model}"}], model=model)
        episode = client.endpoint.episode(Task(task_id="one"), reward=0.5, by=by)
    assert len(episode.trajectories) == {"model": 2, "conversation": 3}[by]
    assert episode.reward == 0.5
