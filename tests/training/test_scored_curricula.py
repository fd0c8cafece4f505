"""Tests runs in which a group scorer, a task sampler, workers and a budget meet. `recount` checks their books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rllm_samplers

from rllm_core.plugins import PluginManager
from rllm_core.training.stopping import BudgetSpent
from rllm_viewer.verify import verify

RunScripted = Callable[..., Any]
MODES = {
    "synchronous": (),
    "asynchronous": ("training.staleness_threshold=2", "training.partial_rollout=true"),
}
SCORER = """
import json
from pathlib import Path

from rllm_core.algorithms.group_scorer import GroupScorer

LOG = Path(__file__).with_name("scored.jsonl")


class Searching(GroupScorer):
    async def score(self, group, services):
        services.count(prompt_tokens=20, completion_tokens=5)
        with LOG.open("a") as file:
            file.write(json.dumps([episode.rollout_id for episode in group.episodes]) + "\\n")
        return {
            one.rollout_id: None if one.rollout_index == 3 else one.trajectories[0].total_reward
            for one in group.episodes
        }
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_budget_ends_a_scored_curriculum_and_a_larger_one_goes_on(
    plugins: PluginManager, run_scripted: RunScripted, tmp_path: Path, mode: str, workers: int
) -> None:
    plugins.register(rllm_samplers, "samplers")
    (tmp_path / "scorer.py").write_text(SCORER)
    settings = (
        *MODES[mode],
        *(("rollout.host=processes", f"rollout.workers={workers}") if workers else ()),
        f"algorithm.group_scorer={tmp_path / 'scorer.py'}",
        "algorithm.filter_uniform_groups=true",
        "training.sampler=difficulty",
        "training.sampler_options={spacing=2}",
        "training.validation_rollouts=0",
        "training.checkpoint_every_steps=1",
    )
    first = run_scripted(*settings, "costs.budget.calls=80")
    assert isinstance(first.error, BudgetSpent)
    assert first.summary["costs"]["calls"] <= 80
    again = run_scripted(*settings, "costs.budget.calls=4000", path=first.path, resume=True)
    assert again.error is None
    assert verify(again.path).problems == []
    judge = again.summary["costs"]["by_kind"]["judge"]
    scored = (tmp_path / "scored.jsonl").read_text().splitlines()
    assert (judge["calls"], judge["prompt_tokens"]) == (len(scored), 20 * len(scored))
    assert max(Counter(scored).values()) == 1, "no group is scored twice"
    books = again.summary["books_by_reason"]
    assert books["filtered"]["unscored"] >= books["trained"]["trained"] // 3 > 0, "one of four in every group"
    assert again.lines("metrics")[-1]["sampler/new_yield"] >= 0
