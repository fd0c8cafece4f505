"""Tests of the observer: its hooks, and what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from rllm_core.config import RunConfig
from rllm_core.events import TrainerState
from rllm_core.plugins import PluginManager
from rllm_core.types import Episode, TerminationReason

from rllm_placeholder import observer


@pytest.fixture
def state(tmp_path: Path) -> TrainerState:
    return TrainerState(RunConfig(workflow="any"), tmp_path, incarnation=0, step=0, weight_version=0, epoch=0)


def written(state: TrainerState) -> list[str]:
    return (state.run_dir / observer.FILE).read_text(encoding="utf-8").splitlines()


def test_the_plugin_is_loaded_with_its_hooks() -> None:
    hooks = PluginManager.from_environment().hooks("placeholder")
    assert set(hooks) == {"on_train_start", "on_episode_finished", "on_batch_end", "on_train_end"}


def test_a_line_per_step(state: TrainerState) -> None:
    observer.on_train_start(state)
    for reason in (TerminationReason.DONE, TerminationReason.DONE, TerminationReason.TIMEOUT):
        observer.on_episode_finished(Episode(task_id="a", termination_reason=reason))
    observer.on_episode_finished(Episode(task_id="b", is_validation=True))
    observer.on_batch_end(state, 1, {"reward_mean": 0.25})
    observer.on_batch_end(state, 2, {})
    observer.on_train_end(state, "completed")
    assert written(state) == [
        "start 0 at step 0",
        "step 1: reward 0.250; rollouts: 2 done, 1 timeout",
        "step 2: no rewards; rollouts: none",
        "completed at step 0",
    ]


def test_a_second_run_counts_from_zero(state: TrainerState) -> None:
    observer.on_episode_finished(Episode(task_id="a"))
    observer.on_train_start(state)
    observer.on_batch_end(state, 1, {"reward_mean": 1.0})
    assert written(state)[-1] == "step 1: reward 1.000; rollouts: none"
