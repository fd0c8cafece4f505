"""Tests what ``rllm-core show`` prints about agents that had an endpoint."""

from __future__ import annotations

import json
from pathlib import Path

from recorded_runs import group, rollout, shown, sorting, step, write_run


def agents(tmp_path: Path, **metrics: float) -> Path:
    """A run of two agents, the second of which began a conversation with its second call."""
    asked = [{"role": "user", "content": "sort: dbca"}]
    first = step(asked, "abcd")
    told = {"role": "user", "content": "again"}
    goes_on = {"prompt_ids": [*first.prompt_ids.tolist(), *first.completion_ids.tolist(), 7]}
    rollouts = [
        rollout(
            index,
            [first, step([*asked, told], "abcd", **more)],
            1.0,
            0.5,
            metrics={"share": 1.0, "gateway_calls": 2.0, "gateway_roots": roots, **metrics},
        )
        for index, (roots, more) in enumerate([(1.0, goes_on), (2.0, {})])
    ]
    rows = [
        {
            "step": at,
            "trajectories": 2.0,
            "samples": 3.0,
            "segment_breaks": at - 1.0,
            "workflow/gateway_calls": 2.0 * at,
        }
        | {"workflow/gateway_roots": 1.5, "workflow/gateway_rewritten_answers": 0.5, "workflow/gateway_retried": 0.0}
        | {"workflow/gateway_ignored_temperature": 2.0, "workflow/gateway_client_seconds": 0.25}
        | {"workflow/gateway_refused_4xx": 1.0}
        | ({"segment_breaks/tools_changed": 1.0} if at == 2 else {})
        for at in (1, 2)
    ]
    return write_run(tmp_path / "run", [group(rollouts, step=1), group(rollouts, step=2)], metrics=rows)


def test_what_agents_did_is_shown_for_a_run(tmp_path: Path) -> None:
    run = agents(tmp_path)
    text = " ".join(shown(run).split())
    for said in (
        "in the last 2 steps:",
        "calls 3 calls in 1.500 conversations, 0.500 answers came back in other words",
        "segments 1.500 per trajectory; breaks in all: tools_changed 1",
        "also client seconds 0.250, refused 4xx 1; ignored: temperature 2",
    ):
        assert said in text
    assert "retried" not in text
    data = json.loads(shown(run, "--json"))["agents"]
    assert data["counts"]["calls"] == 3.0
    assert data["segments_per_trajectory"] == 1.5
    assert data["segment_breaks"] == {"tools_changed": 1.0}


def test_what_an_agent_did_is_shown_for_a_rollout(tmp_path: Path) -> None:
    text = shown(agents(tmp_path, gateway_ignored_seed=1.0), "--step", 2, "--worst")
    assert [line.split(maxsplit=1)[1] for line in text.splitlines() if line.strip().startswith("agent ")] == [
        "2 calls in 1 conversation; 1 segment; ignored: seed 1",
        "2 calls in 2 conversations; 2 segments; ignored: seed 1",
    ]
    assert "parts      share 1\n" in text


def test_a_run_without_agents_says_nothing_of_them(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [sorting(step=1), sorting(step=2)], metrics=[{"step": 1, "trajectories": 2.0}])
    assert not {"agents,", "agent"} & set(shown(run).split())
    assert json.loads(shown(run, "--json"))["agents"] is None
    (run / "metrics.jsonl").write_text("[1]\n", encoding="utf-8")
    assert "worst of the last step" in shown(run)
