"""Trains an unedited agent of openai-agents with backend ``local``, in worker processes."""

from __future__ import annotations

import json
from pathlib import Path

from playing import PLAYERS

import rllm_core
from rllm_core import Run
from rllm_viewer.verify import verify

SCORE = """\
def score(task, text):
    return 1 / (1 + abs(task.data["sum"] - int(text))) if text.isdecimal() else 0.0
"""


def test_an_unedited_agent_trains_in_worker_processes(tmp_path: Path) -> None:
    rows = [{"question": f"{a} plus {b}", "sum": a + b} for a in range(2, 9) for b in range(2, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "score.py").write_text(SCORE)
    settings = {
        "training": {"steps": 2, "groups_per_step": 2, "rollouts_per_group": 4, "validation_rollouts": 4},
        "rollout": {"max_response_tokens": 48, "host": "processes", "workers": 2},
        "agent": {
            "function": f"{PLAYERS / 'trained.py'}:solve",
            "train_file": str(tmp_path / "rows.jsonl"),
            "reward": f"{tmp_path / 'score.py'}:score",
        },
    }
    folder = rllm_core.train("agent", settings, run_dir=tmp_path / "run", backend="local").path
    assert verify(folder).problems == []
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["segment_breaks"] for row in written] == [0, 0]
    assert all(row["rollout_logprob_difference_max"] < 1e-4 for row in written)
    assert any(row["grad_norm"] > 0 for row in written)
    episodes = list(Run(folder).episodes())
    assert len(episodes) == 16
    assert any(len(trajectory.steps) > 1 for episode in episodes for trajectory in episode.trajectories)
    assert [episode.metrics["gateway_roots"] for episode in episodes] == [1] * 16
