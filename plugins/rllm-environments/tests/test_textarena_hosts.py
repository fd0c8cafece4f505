"""Games of TextArena give the same in workers as in the process of the run, one by one and at once."""

from __future__ import annotations

import asyncio

import pytest

import rllm_devkit.scripted_plugin
from rllm_core import Run
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_devkit.scripted import Script, ScriptedBackend


def played(folder, *rollout):
    """Plays 16 games of Kuhn poker in a run; returns what each showed, was answered and paid, by task."""
    plugins = PluginManager.from_environment()
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    settings = (
        "textarena.environment=KuhnPoker-v0", "textarena.train_tasks=16", "training.steps=1",
        "training.groups_per_step=8", "training.rollouts_per_group=2", "training.validation_rollouts=0",
        "training.groups_kept_per_step=8",
        "rollout.max_response_tokens=64", *rollout,
    )  # fmt: skip
    parts = assemble(load_run_config("textarena", plugins, overrides=settings, backend="scripted"), plugins)
    asyncio.run(launch.train(parts, folder, resume=False, progress=Progress()))
    return {
        (episode.task_id, episode.rollout_index): [
            (trajectory.reward, [(step.messages[-1]["content"], step.text) for step in trajectory.steps])
            for trajectory in episode.trajectories
        ]
        for episode in Run(folder).episodes()
    }


@pytest.mark.slow
def test_sixteen_games_are_equal_one_by_one_at_once_and_in_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(ScriptedBackend, "script", Script(good="[check]", bad="[bet]"))
    one_by_one = played(tmp_path / "alone", "rollout.max_concurrent_rollouts=1")
    at_once = played(tmp_path / "inline")
    in_workers = played(tmp_path / "workers", "rollout.host=processes", "rollout.workers=2")
    assert len(one_by_one) == 16
    assert len({str(game) for game in one_by_one.values()}) > 6
    assert at_once == one_by_one
    assert in_workers == one_by_one
