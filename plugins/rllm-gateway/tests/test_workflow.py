"""Tests workflows whose agent is a client, in the process of the run and in workers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from talk import Talk

import rllm_core
from rllm_core import Run
from rllm_devkit.checks import check_workflow
from rllm_viewer.verify import verify

# With this seed, the rewards of some rollouts differ in both steps, so that both train.
SMALL = {
    "training": {"steps": 2, "seed": 1, "groups_per_step": 2, "rollouts_per_group": 4, "validation_rollouts": 4},
    "rollout": {"max_response_tokens": 12},
}


async def test_a_workflow_with_a_gateway_passes_all_checks() -> None:
    results = await check_workflow(Talk, answers=["yes", "no"])
    assert [f"{result.name}: {result.detail}" for result in results if result.outcome == "failed"] == []
    assert "steps" in {result.name for result in results if result.outcome == "passed"}


def test_an_agent_trains_the_same_in_workers(tmp_path: Path) -> None:
    workflow = str(Path(__file__).with_name("talk.py"))

    def train(name: str, **more: Any) -> list[Any]:
        folder = rllm_core.train(workflow, SMALL | more, run_dir=tmp_path / name, backend="local").path
        assert verify(folder).problems == []
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["segment_breaks"] for row in rows] == [0, 0]
        assert [row["rollout_logprob_difference_max"] < 1e-4 for row in rows] == [True, True]
        first = [episode for episode in Run(folder).episodes() if episode.rollout_id.startswith("train-0-")]
        assert first
        said = [[step.text for one in episode.trajectories for step in one.steps] for episode in first]
        assert {len(texts) for texts in said} == {3}
        return sorted(said)

    assert asyncio.run(asyncio.to_thread(train, "inline")) == train("workers", **{"rollout.host": "processes"})
