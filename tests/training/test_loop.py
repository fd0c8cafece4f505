"""Tests the training loop against a straight-line trainer and its documented guarantees."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rllm_core import hookimpl
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.assembly.tasks import TaskStream
from rllm_core.engine import TITOCompleter
from rllm_core.plugins import PluginManager
from rllm_core.training.rollouts import RolloutKey
from rllm_core.types import Episode, SamplingParams, Task, TerminationReason
from rllm_devkit.scripted import (
    ByteParser,
    ScriptedBackend,
    ScriptedEngine,
    ScriptedWorkflow,
    ScriptedWorkflowConfig,
)


def reference(steps: int, groups: int, rollouts: int, *, turns: int = 1, seed: int = 0) -> list[dict[str, float]]:
    """On-policy GRPO on the scripted policy, written out in full."""
    workflow = ScriptedWorkflow(ScriptedWorkflowConfig(turns=turns))
    stream = TaskStream(workflow.tasks("train"), seed)
    engine, params = ScriptedEngine(ByteParser()), SamplingParams(stop_token_ids=(ByteParser.END,))
    skill, rows = 0.5, []
    for step in range(1, steps + 1):
        engine.skill = skill
        push, tokens, rewards = 0.0, 0, []
        for ordinal in range((step - 1) * groups, step * groups):
            episodes = []
            for index in range(rollouts):
                key = RolloutKey("train", ordinal, index)
                completer = TITOCompleter(engine, sampling_params=params, seed=key.seed(seed))
                episodes.append(asyncio.run(workflow.run(stream[ordinal], completer)))
            group = np.array([episode.trajectories[0].total_reward for episode in episodes])
            rewards += group.tolist()
            centred = group - group.mean()
            advantages = np.zeros(rollouts) if np.ptp(group) == 0 else centred / (group.std() + 1e-6)
            for episode, advantage in zip(episodes, advantages, strict=True):
                for taken in episode.trajectories[0].steps:
                    sampled = len(taken.completion_ids)
                    push += (1 if taken.text == "yes" else -1) * sampled * float(np.float32(advantage))
                    tokens += sampled
        skill = min(max(skill + 0.05 * push / tokens, 0.01), 0.99)
        rows.append({"reward_mean": sum(rewards) / len(rewards), "skill": skill, "sampled_tokens": tokens})
    return rows


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize(
    ("backend", "overrides"),
    [
        ("scripted", ()),
        ("scripted", ("training.groups_per_forward_backward=2",)),
        ("scripted_colocated", ()),
        ("scripted_colocated", ("training.groups_per_forward_backward=1",)),
    ],
)
def test_loop_equals_straight_line_trainer(
    run_scripted: Any, backend: str, overrides: tuple[str, ...], turns: int
) -> None:
    run = run_scripted(*overrides, f"say_yes.turns={turns}", backend=backend)
    assert run.error is None
    expected = reference(6, 4, 4, turns=turns)
    for row, want in zip(run.lines("metrics"), expected, strict=True):
        for key, value in want.items():
            assert row[key] == pytest.approx(value, abs=1e-6), (row["step"], key)


def test_books_and_summary(run_scripted: Any) -> None:
    run = run_scripted()
    assert run.summary["status"] == "completed"
    assert run.summary["optimizer_steps"] == run.summary["planned_steps"] == 6
    assert run.summary["resumed_from_step"] is None
    books = run.summary["books"]
    assert books == {"dispatched": 96, "trained": 96, "filtered": 0, "failed": 0, "cancelled": 0}
    assert [v["step"] for v in run.summary["validation"]] == [0, 6]
    assert all(v["rollouts"] == 10 and v["failed"] == 0 for v in run.summary["validation"])
    assert [row["step"] for row in run.lines("metrics")] == [1, 2, 3, 4, 5, 6]
    assert [row["weight_version"] for row in run.lines("metrics")] == [1, 2, 3, 4, 5, 6]
    assert (run.path / "checkpoints/step-000006/manifest.json").is_file()


class Recorder:
    """Observer that records every event in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    @hookimpl
    def on_train_start(self) -> None:
        self.events.append(("train_start",))

    @hookimpl
    async def on_policy_updated(self, update: Any) -> None:
        self.events.append(("policy", update.version, update.reason))

    @hookimpl
    def on_epoch_start(self, epoch: int) -> None:
        self.events.append(("epoch_start", epoch))

    @hookimpl
    def on_epoch_end(self, epoch: int) -> None:
        self.events.append(("epoch_end", epoch))

    @hookimpl
    def on_batch_start(self, step: int) -> None:
        self.events.append(("batch_start", step))

    @hookimpl
    async def on_batch_end(self, step: int) -> None:
        self.events.append(("batch_end", step))

    @hookimpl
    def on_validation_start(self, step: int) -> None:
        self.events.append(("validation_start", step))

    @hookimpl
    def on_validation_end(self, step: int) -> None:
        self.events.append(("validation_end", step))

    @hookimpl
    def on_checkpoint_saved(self, step: int) -> None:
        self.events.append(("checkpoint", step))

    @hookimpl
    def on_train_end(self, status: str) -> None:
        self.events.append(("train_end", status))


def test_order_of_all_hooks(run_scripted: Any) -> None:
    recorder = Recorder()
    run = run_scripted("training.steps=2", "say_yes.tasks=4", observers=recorder)
    assert run.error is None
    ordered = [event for event in recorder.events if not event[0].startswith("epoch")]
    assert ordered == [
        ("train_start",),
        ("policy", 0, "start"),
        ("validation_start", 0),
        ("validation_end", 0),
        ("batch_start", 1),
        ("policy", 1, "step"),
        ("batch_end", 1),
        ("batch_start", 2),
        ("policy", 2, "step"),
        ("batch_end", 2),
        ("validation_start", 2),
        ("validation_end", 2),
        ("checkpoint", 2),
        ("train_end", "completed"),
    ]
    epochs = [event for event in recorder.events if event[0].startswith("epoch")]
    assert epochs == [("epoch_start", 0), ("epoch_end", 0), ("epoch_start", 1), ("epoch_end", 1)]


def test_observers_hear_of_every_rollout_of_training_and_validation(run_scripted: Any) -> None:
    class Hears:
        rollouts: ClassVar[list[bool]] = []

        @hookimpl
        def on_episode_finished(self, episode: Any) -> None:
            self.rollouts.append(episode.is_validation)

    run = run_scripted("training.steps=2", observers=Hears())
    assert run.error is None
    validated = sum(validation["rollouts"] for validation in run.summary["validation"])
    assert Hears.rollouts.count(True) == validated > 0
    assert Hears.rollouts.count(False) == run.summary["books"]["trained"] == 32


def test_order_of_backend_calls(run_scripted: Any) -> None:
    run = run_scripted("training.steps=2", "training.groups_per_forward_backward=2", backend="scripted_colocated")
    assert run.assembly.backend.calls.names() == [
        "on_policy_updated",
        "enter_generation",
        *2 * ["enter_training", "process_backend_batch", "process_backend_batch", "update_policy",
              "on_policy_updated", "enter_generation"],
        "save_checkpoint",
        "shutdown",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("sync_every", [1, 2, 4])
def test_asynchronous_run_keeps_its_promises(run_scripted: Any, partial: bool, sync_every: int) -> None:
    recorder = Recorder()
    run = run_scripted(
        "training.steps=7",
        "training.staleness_threshold=2",
        f"training.partial_rollout={str(partial).lower()}",
        f"training.trigger_parameter_sync_step={sync_every}",
        observers=recorder,
    )
    assert run.error is None
    assert run.summary["optimizer_steps"] == 7
    assert run.summary["books"]["trained"] == run.summary["books"]["dispatched"] == 7 * 16
    versions = [event[1] for event in recorder.events if event[0] == "policy"]
    assert versions == list(range(len(versions))), "each version once"
    assert len(versions) == 1 + -(-7 // sync_every), "the last, partial window is synchronised too"
    assert run.summary["validation"][-1]["weight_version"] == versions[-1]
    assert all(row["staleness_max"] >= 0 for row in run.lines("metrics"))


@pytest.mark.parametrize(("threshold", "sync_every"), [(1, 1), (2, 1), (1, 2), (0.5, 2)])
def test_strict_staleness_bounds_the_age_of_every_group(
    run_scripted: Any, monkeypatch: pytest.MonkeyPatch, threshold: float, sync_every: int
) -> None:
    def long_tail(generator: Any) -> float:
        return 0.002 if generator.random() < 0.95 else 0.05

    monkeypatch.setattr(ScriptedBackend.script, "latency_seconds", long_tail)
    run = run_scripted(
        "training.steps=24",
        "training.validation_rollouts=0",
        f"training.staleness_threshold={threshold}",
        f"training.trigger_parameter_sync_step={sync_every}",
        "training.partial_rollout=true",
        "training.staleness=strict",
    )
    assert run.error is None
    assert 0 < max(row["staleness_max"] for row in run.lines("metrics")) <= np.ceil(threshold)


def test_quota_staleness_bounds_the_lead_but_not_the_age_of_a_straggler(
    run_scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ScriptedWorkflow.run

    async def slow_first(self: Any, task: Any, completer: TITOCompleter) -> Any:
        episode = await original(self, task, completer)
        if task.task_id == first:
            while completer.engine.weight_version < 4:
                await asyncio.sleep(0.001)
        return episode

    first = TaskStream(ScriptedWorkflow().tasks("train"), 0)[0].task_id
    monkeypatch.setattr(ScriptedWorkflow, "run", slow_first)
    run = run_scripted(
        "training.steps=12",
        "training.validation_rollouts=0",
        "training.staleness_threshold=1",
        "training.partial_rollout=true",
    )
    assert run.error is None
    assert max(row["staleness_max"] for row in run.lines("metrics")) >= 4


def test_uniform_groups_are_refilled(run_scripted: Any) -> None:
    run = run_scripted("algorithm.filter_uniform_groups=true", "training.rollouts_per_group=2")
    assert run.error is None
    books = run.summary["books"]
    assert books["trained"] == 6 * 8
    assert books["filtered"] > 0
    assert books["dispatched"] == books["trained"] + books["filtered"]
    assert run.summary["books_by_reason"]["filtered"] == {"uniform_reward": books["filtered"]}
    assert all(row["uniform_groups_share"] == 0 for row in run.lines("metrics"))


def test_a_run_whose_rollouts_all_fail_says_so(run_scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_without_a_call(self: Any, task: Task, completer: Any) -> Episode:
        return Episode(task_id=task.task_id, trajectories=[], termination_reason=TerminationReason.DONE)

    monkeypatch.setattr(ScriptedWorkflow, "run", run_without_a_call)
    run = run_scripted("algorithm.max_group_attempts=2", "rollout.max_attempts=1")
    assert "groups because rollouts failed (run so far: failed: done " in str(run.error)
    assert "too many were filtered" not in str(run.error)


def test_a_run_whose_groups_are_all_filtered_ends_with_the_reason(run_scripted: Any) -> None:
    def certain(assembly: Any) -> None:
        assembly.backend.skill = 0.0

    run = run_scripted("algorithm.filter_uniform_groups=true", "algorithm.max_group_attempts=3", prepare=certain)
    assert "because too many were filtered" in str(run.error)
    assert run.summary["status"] == "failed"
    assert run.summary["books"]["trained"] == 0
    ended = sum(run.summary["books"][key] for key in ("trained", "filtered", "failed", "cancelled"))
    assert run.summary["books"]["dispatched"] == ended > 0


def test_groups_too_small_for_the_estimator_are_refused_at_once(plugins: PluginManager, tmp_path: Path) -> None:
    from rllm_core.errors import ConfigError

    config = load_run_config("say_yes", plugins, overrides=["training.rollouts_per_group=1"], backend="scripted")
    with pytest.raises(ConfigError, match="rollouts_per_group = 1 is too small"):
        assemble(config, plugins)


def test_state_baseline_trains_groups_of_one(run_scripted: Any) -> None:
    by_state = ("algorithm.name=return_to_go", "algorithm.estimator_options.baseline=state")
    run = run_scripted("training.rollouts_per_group=1", *by_state)
    assert run.error is None
    assert run.summary["books"]["trained"] == 6 * 4


def test_observer_failures_are_counted_and_do_not_stop_training(run_scripted: Any) -> None:
    class Raises:
        @hookimpl
        def on_batch_end(self) -> None:
            raise RuntimeError("observer is broken")

    run = run_scripted(observers=Raises())
    assert run.summary["status"] == "completed"
    assert run.summary["observer_failures"] == {"observer": 6}
