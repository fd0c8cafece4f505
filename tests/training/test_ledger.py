"""Tests the life of groups: every transition writes its event and keeps the accounting."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rllm_core.algorithms.advantages import RoleEstimators
from rllm_core.algorithms.grouping import FilterReason
from rllm_core.backend import OptimizerStep
from rllm_core.builtin.estimators.outcome import GRPO
from rllm_core.errors import RunError
from rllm_core.training.buffer import GroupBuffer
from rllm_core.training.group import Group, GroupRules
from rllm_core.training.ledger import Ledger
from rllm_core.training.staleness_limit import SyncCoordinator
from rllm_core.types import Episode, Step, TerminationReason, Trajectory

ROLLOUTS = 2


class Events:
    """Collects the events of a ledger."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def event(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))


def make() -> tuple[Ledger, Events]:
    events = Events()
    buffer = GroupBuffer(GroupRules(RoleEstimators(GRPO()), drop_uniform=True))
    coordinator = SyncCoordinator(window_quota=8, groups_needed=8)
    return Ledger(coordinator, buffer, events, rollouts_per_group=ROLLOUTS, per_take=2), events  # type: ignore[arg-type]


def play(ledger: Ledger, ordinal: int, *, rewards: tuple[float | None, ...] = (0.0, 1.0)) -> Group:
    """Starts and closes a group; a reward of None is a failed rollout."""
    group = Group(ordinal, f"task-{ordinal}", 0, ROLLOUTS)
    ledger.start(group)
    for index, reward in enumerate(rewards):
        step = Step(prompt_ids=[1], completion_ids=[2], logprobs=[-1.0], weight_version=0)
        failed = {"termination_reason": TerminationReason.ERROR, "error": "no"}
        ended = failed if reward is None else {"trajectories": [Trajectory(steps=[step], reward=reward)]}
        group.add(Episode(task_id=group.task_id, rollout_index=index, **ended))
    reason = ledger.buffer.rules.close(group)
    if reason is None:
        ledger.complete(group)
    else:
        ledger.filter(group, reason)
    return group


def test_groups_from_start_to_end() -> None:
    ledger, events = make()
    for ordinal in range(3):
        play(ledger, ordinal)
    play(ledger, 3, rewards=(1.0, 1.0))
    play(ledger, 4, rewards=(1.0, None))
    ledger.check()
    assert [group.ordinal for group in asyncio.run(ledger.take())] == [0, 1]
    step = OptimizerStep(step=1, total_steps=4, samples=4, sampled_tokens=4, trajectories=4)
    assert [group.ordinal for group in ledger.train(step)] == [0, 1]
    ledger.start(Group(5, "task-5", 0, ROLLOUTS))
    ledger.cancel_running("interrupted")
    ledger.cancel_complete("interrupted")
    ledger.check()
    assert ledger.books.open == 0
    assert ledger.books.by_reason() == {
        "trained": {"trained": 4},
        "filtered": {"incomplete_group": 1, "uniform_reward": 2},
        "failed": {"error": 1},
        "cancelled": {"interrupted": 4},
    }
    assert ledger.due == [2, 5]
    names = [name for name, _ in events.lines if name not in ("dispatch", "enqueue")]
    assert names == ["filter", "filter", "consume", "step", "cancel", "cancel"]
    assert ("filter", {"group": 4, "reason": FilterReason.INCOMPLETE_GROUP, "failed": {"error": 1}}) in events.lines


def test_an_unfinished_step_gives_its_groups_back() -> None:
    ledger, events = make()
    play(ledger, 0)
    play(ledger, 1)
    taken = asyncio.run(ledger.take())
    ledger.give_back()
    ledger.give_back()  # nothing is left to return
    assert [name for name, _ in events.lines].count("return") == 1
    ledger.check()
    assert asyncio.run(ledger.take()) == taken


def test_a_checkpoint_restores_complete_groups_and_starts_the_others_again(tmp_path: Path) -> None:
    ledger, _ = make()
    play(ledger, 0)
    ledger.start(Group(1, "task-1", 0, ROLLOUTS))
    buffered = ledger.buffer.write(tmp_path / "buffer.jsonl")
    state = ledger.books_after_restart(buffered), ledger.due_after_restart(buffered), tmp_path / "buffer.jsonl"
    assert state[0]["ended"] == {"cancelled": {"restart": ROLLOUTS}}
    again, _ = make()
    again.restore(*state, buffered)
    again.check()
    assert (again.due, again.buffer.ordinals()) == ([1], [0])
    with pytest.raises(ValueError, match=r"does not contain the groups \[0, 1\]"):
        make()[0].restore(*state, [0, 1])


def test_a_lost_group_is_noticed() -> None:
    ledger, _ = make()
    play(ledger, 0)
    ledger.coordinator.on_discarded(1)
    with pytest.raises(RunError, match="rollout accounting is inconsistent"):
        ledger.check()
