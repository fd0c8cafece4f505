"""Tests complete groups between generation and training: stored, bounded, spilled, restored."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm_core.errors import RunError
from rllm_core.training.buffer import GroupBuffer
from rllm_core.training.group import Group, GroupRules
from rllm_core.types import Episode, PlacedMedia, Step, Trajectory
from rllm_devkit.scripted import ScriptedBackend, ScriptedWorkflow

from rllm_core.algorithms.advantages import RoleEstimators  # isort: skip
from rllm_core.builtin.estimators.outcome import GRPO  # isort: skip

AHEAD = ("training.staleness_threshold=2", "training.trigger_parameter_sync_step=2", "training.partial_rollout=true")


def episode(index: int, *, tokens: int = 50, media: bool = False) -> Episode:
    pieces = (PlacedMedia(sha256="0" * 64, kind="image", length_tokens=1, start=0),) if media else ()
    step = Step(
        messages=[{"role": "user", "content": "x" * tokens}],
        response={"role": "assistant", "content": "y"},
        prompt_ids=range(tokens),
        prompt_media=pieces,
        completion_ids=[7, index],
        logprobs=[-0.1234567, -1.0 / 3.0],
        weight_version=3,
    )
    return Episode(task_id="t", rollout_index=index, trajectories=[Trajectory(steps=[step], reward=float(index))])


RULES = GroupRules(RoleEstimators(GRPO()), drop_uniform=False)


def complete(ordinal: int, **options: Any) -> Group:
    group = Group(ordinal, "t", 1, 4)
    for index in range(4):
        group.add(episode(index, **options))
    assert RULES.close(group) is None
    return group


def make(**options: Any) -> GroupBuffer:
    return GroupBuffer(RULES, **options)


def test_a_written_group_is_restored_to_the_last_bit() -> None:
    group = complete(5)
    restored = RULES.restore(group.to_json())
    assert (restored.ordinal, restored.task_id, restored.epoch) == (5, "t", 1)
    assert restored.episodes == group.episodes
    assert restored.groups == group.groups
    advantages = [RULES.estimators(each.groups) for each in (restored, group)]
    for mine, theirs in zip(*advantages, strict=True):
        assert [np.asarray(credit).tobytes() for credit in mine] == [np.asarray(credit).tobytes() for credit in theirs]


def test_groups_beyond_the_memory_go_to_the_disk_and_come_back_in_order(tmp_path: Path) -> None:
    size = complete(0).size_bytes
    buffer = make(max_bytes=2 * size + size // 2, spill=tmp_path / "spill")
    whole = make()
    for ordinal in (4, 1, 3, 0, 2):
        group = complete(ordinal)
        whole.put(group)
        buffer.put(group)
        assert buffer.size_bytes <= buffer.max_bytes
    assert len(buffer) == 5
    assert len(list((tmp_path / "spill").iterdir())) == 3
    assert not buffer.is_full
    taken, expected = asyncio.run(buffer.take(5)), asyncio.run(whole.take(5))
    assert [group.to_json() for group in taken] == [group.to_json() for group in expected]
    assert list((tmp_path / "spill").iterdir()) == []
    assert buffer.size_bytes == 0


def test_images_are_not_written_to_files(tmp_path: Path) -> None:
    buffer = make(max_bytes=1, spill=tmp_path / "spill")
    for ordinal in range(3):
        buffer.put(complete(ordinal, media=ordinal == 2))
    assert [path.name for path in (tmp_path / "spill").iterdir()] == ["group-1.jsonl"]
    assert buffer.write(tmp_path / "buffer.jsonl") == [0, 1]
    assert len((tmp_path / "buffer.jsonl").read_bytes().splitlines()) == 2
    assert [group.ordinal for group in asyncio.run(buffer.take(3))] == [0, 1, 2]


def test_the_size_counts_shared_prompts_once() -> None:
    short, long = complete(0, tokens=10).size_bytes, complete(0, tokens=1010).size_bytes
    assert long - short == 4 * (1000 * 4 + 1000)  # four rollouts: ids of four bytes each, plus the text of the message


@pytest.mark.slow
@pytest.mark.parametrize("spill", ["true", "false"])
def test_a_buffer_that_is_always_full_neither_stalls_nor_changes_what_is_trained(run_scripted: Any, spill: str) -> None:
    tight = run_scripted(*AHEAD, "training.buffer_max_bytes=1", f"training.buffer_spill={spill}")
    assert tight.error is None
    assert tight.summary["books"]["trained"] == 96
    trained = [ordinal for event in tight.lines("events") if event["event"] == "step" for ordinal in event["groups"]]
    assert sorted(trained) == list(range(24))
    assert not list(tight.path.glob("spill/*"))


def let_generation_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each step take so many turns of the event loop, and no time, that generation does all it may meanwhile."""
    update_policy = ScriptedBackend.update_policy

    async def updated_late(self: ScriptedBackend, step: Any) -> Any:
        for _ in range(2000):
            await asyncio.sleep(0)
        return await update_policy(self, step)

    monkeypatch.setattr(ScriptedBackend, "update_policy", updated_late)


@pytest.mark.slow
def test_a_full_buffer_holds_generation_up(run_scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    let_generation_run_ahead(monkeypatch)
    more = (*AHEAD, "training.steps=16")
    free = run_scripted(*more)
    tight = run_scripted(*more, "training.buffer_max_bytes=1", path=free.path.parent / "tight")
    assert waiting_when_more_were_dispatched(free) > 4
    assert waiting_when_more_were_dispatched(tight) < 4


def waiting_when_more_were_dispatched(run: Any) -> int:
    """Returns the most complete groups waiting at any dispatch after the first window."""
    waiting, most = 0, 0
    for event in run.lines("events"):
        match event["event"]:
            case "enqueue":
                waiting += 1
            case "consume":
                waiting -= len(event["groups"])
            case "dispatch" if event["group"] >= 24:
                most = max(most, waiting)
    return most


@pytest.mark.slow
def test_complete_groups_survive_a_restart(run_scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    let_generation_run_ahead(monkeypatch)
    more = (*AHEAD, "training.checkpoint_every_steps=1", "training.steps=8")

    def break_late(assembly: Any) -> None:
        original = assembly.backend.update_policy

        async def breaks(step: Any) -> Any:
            if step.step == 4:
                raise OSError("gone")
            return await original(step)

        assembly.backend.update_policy = breaks

    run = run_scripted(*more, prepare=break_late)
    assert isinstance(run.error, OSError)
    manifest = json.loads((run.path / "checkpoints/step-000003/manifest.json").read_text())
    buffered = manifest["generation"]["buffered_ordinals"]
    assert len(buffered) > 4
    assert not set(buffered) & set(manifest["generation"]["due_ordinals"])
    again = run_scripted(*more, resume=True)
    assert again.error is None
    begun = [event for event in again.lines("events") if event["event"] == "begin"]
    assert begun[-1]["restored"] == buffered
    dispatched = [event["group"] for event in again.lines("events") if event["event"] == "dispatch"]
    assert all(dispatched.count(ordinal) == 1 for ordinal in buffered), "they were not generated again"
    trained = [ordinal for event in again.lines("events") if event["event"] == "step" for ordinal in event["groups"]]
    assert sorted(trained) == list(range(32))


@pytest.mark.slow
def test_a_strict_run_takes_no_group_over_that_a_restart_would_make_too_old(
    run_scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_generation_run_ahead(monkeypatch)
    more = (*AHEAD, "training.staleness=strict", "training.checkpoint_every_steps=3", "training.steps=8")

    def break_late(assembly: Any) -> None:
        original = assembly.backend.update_policy

        async def breaks(step: Any) -> Any:
            if step.step == 4:
                raise OSError("gone")
            return await original(step)

        assembly.backend.update_policy = breaks

    run_scripted(*more, prepare=break_late)
    again = run_scripted(*more, resume=True)  # checks every group's staleness
    assert again.error is None
    begun = [event for event in again.lines("events") if event["event"] == "begin"]
    assert begun[-1]["step"] == 3
    assert begun[-1]["restored"] == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", [(), AHEAD])
def test_a_workflow_decides_what_is_compared_in_both_modes(
    run_scripted: Any, monkeypatch: pytest.MonkeyPatch, mode: tuple[str, ...]
) -> None:
    seen: set[tuple[str, int]] = set()

    def half(self: Any, episode: Episode, trajectory: Trajectory) -> str:
        return f"half-{episode.rollout_index % 2}"

    def remember(assembly: Any) -> None:
        original = assembly.algorithm.estimators.default.__class__.__call__

        def call(self: Any, groups: Any) -> Any:
            seen.update((group.role, len(group.trajectories)) for group in groups)
            return original(self, groups)

        monkeypatch.setattr(assembly.algorithm.estimators.default.__class__, "__call__", call)

    monkeypatch.setattr(ScriptedWorkflow, "group_of", half)
    run = run_scripted(*mode, prepare=remember)
    assert run.error is None
    assert seen == {("half-0", 2), ("half-1", 2)}


@pytest.mark.slow
def test_a_group_without_a_name_ends_the_run(run_scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedWorkflow, "group_of", lambda *_: None)
    run = run_scripted("rollout.quarantine_after_groups=1")
    assert isinstance(run.error, RunError)
    assert "group_of() returned None; return a name, such as trajectory.role" in str(run.error)
    assert run.summary["retries"] == 0
