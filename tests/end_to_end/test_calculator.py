"""Tests learning to call a tool, with each parser, the workflow's tools and the backend's gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked import Forks

from benchmarks.learning import PARSERS, tool_call_share
from rllm_core.types import Episode

pytestmark = pytest.mark.slow

# The other runs of this suite have the first parser, also over several turns.
FIRST_PARSER, OTHER_PARSER = PARSERS["calculator"]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("parser", [pytest.param(FIRST_PARSER, marks=pytest.mark.by_hand), OTHER_PARSER])
def test_the_call_is_learned_and_every_trajectory_is_one_segment(forking: Forks, tmp_path: Path, parser: str) -> None:
    run_dir = tmp_path / "run"
    command = ["train", "calculator", "--parser", parser, "--run-dir", str(run_dir)]
    process = forking.start([*command, "-o", "training.trajectories_per_step=16"], output=tmp_path)
    assert process.wait() == 0, process.err
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    first, last = summary["validation"][0], summary["validation"][-1]
    assert first["rollouts"] == last["rollouts"] == 512
    assert first["solved"] <= 0.05
    assert last["solved"] >= 0.9
    metrics = read_lines(run_dir / "metrics.jsonl")
    assert sum(step["segment_breaks"] for step in metrics) == 0
    assert all(step["samples"] == step["trajectories"] for step in metrics), "a rollout is one training sample"
    # A step whose rollouts are all solved has no advantages, so it computes no log-probabilities.
    assert max(step["rollout_logprob_difference_max"] for step in metrics if step["solved"] < 1) < 1e-4

    kept = read_lines(run_dir / "trajectories.jsonl")
    assert tool_call_share(kept) >= 0.9
    episodes = [Episode.model_validate(line["episode"]) for line in kept]
    solved = [episode for episode in episodes if episode.is_correct]
    assert all(episode.metrics["calls_executed"] >= 1 for episode in solved), "nobody knows the answer without a call"
    shown: dict[str, set[str]] = {}
    for episode in solved:
        shown.setdefault(episode.task_id, set()).add(episode.trajectories[0].steps[-1].text)
    assert max(map(len, shown.values())) > 1, "the same question has another answer in another rollout"
