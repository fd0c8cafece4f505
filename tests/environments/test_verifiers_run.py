"""A taskset of verifiers trains: the trainer is here, verifiers is in an environment of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import rllm_core
from rllm_core.assembly.resolution import resolve_run
from rllm_core.errors import ConfigError
from rllm_core.plugins import PluginManager
from rllm_viewer.verify import verify

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
EXAMPLE = ROOT / "examples" / "verifiers" / "earliest.toml"


def test_an_example_trains_and_replays(tmp_path: Path) -> None:
    settings = {
        "rollout.python": str(PYTHON),
        "rollout.workers": 1,
        "training.steps": 2,
        "training.groups_per_step": 2,
        "training.rollouts_per_group": 4,
        "training.validation_rollouts": 4,
    }
    run = rllm_core.train(str(EXAMPLE), settings, run_dir=tmp_path / "run")
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["rollout_host"]["name"] == "processes"
    assert verify(run.path).problems == []
    assert "verifiers" not in sys.modules
    groups = [json.loads(line) for line in (run.path / "groups.jsonl").read_text().splitlines()]
    played = [(group["task"]["data"]["row"], one["episode"]) for group in groups for one in group["rollouts"]]
    assert len(played) >= 4 + 4, "validation before and after, and what is kept of training"
    for row, episode in played:
        [trajectory] = episode["trajectories"]
        answer = trajectory["steps"][0]["response"]["content"]
        assert answer in set("abcdefgh"), "the warm start teaches the form"
        assert trajectory["reward"] == float(answer == row["answer"])


def test_its_refusals_are_one_line() -> None:
    plugins = PluginManager.from_environment()
    known = {"rollout.python": str(PYTHON), "verifiers.environment": "textarena"}
    settings = known | {"verifiers.environment": "./no_such_taskset.py"}
    with pytest.raises(ConfigError, match="no taskset at"):
        rllm_core.train("verifiers", settings | {"training.steps": 1, "backend": "local"}, run_dir=ROOT / "nowhere")
    with pytest.raises(ConfigError, match=r"verifiers\.enviroment"):
        resolve_run("verifiers", plugins, settings=known | {"verifiers.enviroment": "x"})
    with pytest.raises(ConfigError, match="no-such-taskset"):
        resolve_run("verifiers/no-such-taskset", plugins, settings={"rollout.python": str(PYTHON)})
    resolved = resolve_run("verifiers/textarena", plugins, settings={"rollout.python": str(PYTHON)})
    assert resolved.config.plugins["verifiers"].environment == "textarena"
