"""Tests coordinator and buffer with random interleavings: nothing is lost, no needless waits, limits hold."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rllm_core.algorithms.advantages import RoleEstimators
from rllm_core.builtin.estimators.outcome import GRPO
from rllm_core.config import TrainingConfig
from rllm_core.training.buffer import GroupBuffer
from rllm_core.training.group import Group, GroupRules
from rllm_core.training.staleness_limit import SyncCoordinator
from rllm_core.types import Step, Trajectory, TrajectoryGroup

ROLLOUTS = 2


def complete_group(ordinal: int, version: int) -> Group:
    step = Step(prompt_ids=[1], completion_ids=[2], weight_version=version)
    trajectories = [Trajectory(steps=[step], reward=0.0)] * ROLLOUTS
    group = TrajectoryGroup(
        group_id=ordinal, task_id="t", trajectories=trajectories, rollout_ids=["r"] * ROLLOUTS, weight_version=version
    )
    return Group(ordinal, "t", 0, ROLLOUTS, groups=[group])


async def _three_rounds() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


class Loop(RuleBasedStateMachine):
    """Drives generation and training by hand, as the trainer does, in any possible order.

    The guarantees of the real loop's order hold here too: a group is dispatched only after admission, training takes
    whole steps, and weights go live between two steps.
    """

    operations = 0

    @initialize(
        threshold=st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]),
        sync_step=st.integers(1, 2),
        groups_per_step=st.integers(1, 3),
        steps=st.integers(1, 40),
        strict=st.booleans(),
        partial=st.booleans(),
    )
    def begin(
        self, threshold: float, sync_step: int, groups_per_step: int, steps: int, strict: bool, partial: bool
    ) -> None:
        self.training = TrainingConfig(
            staleness_threshold=threshold,
            trigger_parameter_sync_step=sync_step,
            groups_per_step=groups_per_step,
            steps=steps,
            staleness="strict" if strict else "quota",
            partial_rollout=partial,
        )
        self.loop = asyncio.new_event_loop()
        self.coordinator = SyncCoordinator(
            window_quota=self.training.window_quota, groups_needed=steps * groups_per_step
        )
        self.buffer = GroupBuffer(GroupRules(RoleEstimators(GRPO()), drop_uniform=False), in_order=strict)
        self.in_flight: dict[int, int] = {}  # ordinal: weight version at dispatch
        self.ordinal = self.step = self.trained = self.given_up = 0
        self.syncing = False
        self.admission: asyncio.Task[bool] | None = None
        self.taking: asyncio.Task[list[Group]] | None = None
        self.draining: asyncio.Task[None] | None = None
        self.validations: set[int] = set()
        self.wait_for_groups()
        self.tick()

    def tick(self) -> None:
        """Lets every woken task run."""
        type(self).operations += 1
        self.loop.run_until_complete(_three_rounds())

    @precondition(lambda self: self.admission is None)
    @rule()
    def ask_for_admission(self) -> None:
        self.admission = self.loop.create_task(self.coordinator.admit())
        self.tick()

    @precondition(lambda self: self.admission is not None and self.admission.done())
    @rule(groups=st.integers(1, 5))
    def dispatch(self, groups: int) -> None:
        for _ in range(groups):
            if self.admission is not None and self.admission.done():
                self.dispatch_one()

    def dispatch_one(self) -> None:
        assert self.admission is not None
        admitted, self.admission = self.admission.result(), None
        if not admitted:
            assert self.coordinator.consumed == self.coordinator.groups_needed
            return
        if not self.coordinator.may_dispatch():
            return  # since admission, weights went live or generation was paused
        self.coordinator.on_dispatched()
        self.buffer.expect(self.ordinal)
        self.in_flight[self.ordinal] = self.coordinator.weight_version
        self.ordinal += 1
        self.admission = self.loop.create_task(self.coordinator.admit())
        self.tick()

    @precondition(lambda self: self.in_flight)
    @rule(which=st.lists(st.integers(0, 100), min_size=1, max_size=6))
    def finish(self, which: list[int]) -> None:
        for choice in which[: len(self.in_flight)]:
            ordinal = sorted(self.in_flight)[choice % len(self.in_flight)]
            self.buffer.put(complete_group(ordinal, self.in_flight.pop(ordinal)))
            self.coordinator.on_completed()
            self.tick()

    @precondition(lambda self: self.in_flight)
    @rule(which=st.integers(0, 100))
    def fail_or_filter(self, which: int) -> None:
        ordinal = sorted(self.in_flight)[which % len(self.in_flight)]
        del self.in_flight[ordinal]
        self.given_up += 1
        self.buffer.drop(ordinal)
        self.coordinator.on_dropped()
        self.tick()

    def wait_for_groups(self) -> None:
        if self.step < self.training.steps:
            self.taking = self.loop.create_task(self.buffer.take(self.training.groups_per_step))

    @precondition(lambda self: self.taking is not None and self.taking.done())
    @rule(unfinished=st.sampled_from([False, False, False, True]))
    def train(self, unfinished: bool) -> None:
        assert self.taking is not None
        taken, self.taking = self.taking.result(), None
        self.coordinator.on_consumed(len(taken))
        if self.training.staleness == "strict":
            for group in taken:
                age = self.coordinator.weight_version - group.weight_version
                assert age <= math.ceil(self.training.staleness_threshold)
        if unfinished:
            for group in taken:
                self.buffer.put(group)
            self.coordinator.on_returned(len(taken))
            self.wait_for_groups()
        else:
            self.trained += len(taken)
            self.step += 1
            due = self.step % self.training.trigger_parameter_sync_step == 0 or self.step == self.training.steps
            if due:
                self.begin_sync()
            else:
                self.wait_for_groups()
        self.tick()

    def begin_sync(self) -> None:
        self.syncing = True
        if not self.training.partial_rollout:
            self.coordinator.pause()
            self.draining = self.loop.create_task(self.coordinator.drained())

    @precondition(lambda self: self.syncing and (self.draining is None or self.draining.done()))
    @rule()
    def weights_go_live(self) -> None:
        if self.draining is not None:
            assert not self.in_flight
            self.draining = None
        self.coordinator.on_synced(self.coordinator.weight_version + 1)
        self.coordinator.resume()
        self.syncing = False
        self.wait_for_groups()
        self.tick()

    @rule(full=st.sampled_from([False] * 7 + [True]))
    def memory(self, full: bool) -> None:
        self.coordinator.throttle(full)
        self.tick()

    @rule()
    def validate(self) -> None:
        """Validates without the coordinator: validation neither uses a slot nor waits for one."""
        type(self).operations += 1
        before = self.coordinator.state_dict(), self.coordinator.in_flight, self.coordinator.buffered
        self.validations.add(self.coordinator.weight_version)
        self.coordinator.touch()
        assert before == (self.coordinator.state_dict(), self.coordinator.in_flight, self.coordinator.buffered)

    @invariant()
    def counters_are_what_happened(self) -> None:
        if not hasattr(self, "coordinator"):
            return
        coordinator = self.coordinator
        waiting = len(self.taking.result()) if self.taking is not None and self.taking.done() else 0
        assert coordinator.in_flight == len(self.in_flight) >= 0
        assert coordinator.buffered == len(self.buffer) + waiting >= 0
        assert coordinator.consumed == self.trained >= 0
        assert 0 <= coordinator.consumed_in_window <= coordinator.consumed
        assert self.ordinal == self.trained + self.given_up + coordinator.outstanding, "conservation"

    @invariant()
    def the_quota_is_respected(self) -> None:
        if hasattr(self, "coordinator"):
            coordinator = self.coordinator
            assert coordinator.outstanding + coordinator.consumed_in_window <= coordinator.window_quota
            assert coordinator.outstanding + coordinator.consumed <= coordinator.groups_needed

    @invariant()
    def nobody_waits_for_what_has_happened(self) -> None:
        if not hasattr(self, "coordinator"):
            return
        if self.admission is not None and self.coordinator.may_dispatch():
            assert self.admission.done(), "a lost wake-up of generation"
        if self.draining is not None and not self.in_flight:
            assert self.draining.done(), "a lost wake-up of the drain"
        if self.taking is not None and not self.taking.done():
            complete, running = self.buffer.ordinals(), sorted(self.in_flight)
            wanted = self.training.groups_per_step
            enough = len(complete) >= wanted
            if enough and self.training.staleness == "strict":
                enough = complete[wanted - 1] < min(running, default=sys.maxsize)
            assert not enough, "a lost wake-up of training"

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        waiting: list[Any] = [task for task in (self.admission, self.taking, self.draining) if task is not None]
        for task in waiting:
            task.cancel()

        async def settle() -> None:
            await asyncio.gather(*waiting, return_exceptions=True)

        self.loop.run_until_complete(settle())
        self.loop.close()


def play(seed: int, operations: int) -> int:
    """Runs the machine at random for long, preferring rules that make progress; returns the number of trained steps."""
    chance = random.Random(seed)
    machine = Loop()
    machine.begin(
        threshold=chance.choice([0.0, 0.5, 1.0, 2.0, 4.0]),
        sync_step=chance.randint(1, 3),
        groups_per_step=chance.randint(1, 4),
        steps=chance.randint(1, 60),
        strict=chance.random() < 0.5,
        partial=chance.random() < 0.5,
    )
    for _ in range(operations):
        match chance.choices(("admit", "dispatch", "finish", "fail", "train", "live", "memory"), (4, 6, 8, 1, 6, 4, 1)):
            case ["admit"] if machine.admission is None:
                machine.ask_for_admission()
            case ["dispatch"] if machine.admission is not None and machine.admission.done():
                machine.dispatch_one()
            case ["finish"] if machine.in_flight:
                machine.finish([chance.randrange(100)])
            case ["fail"] if machine.in_flight:
                machine.fail_or_filter(chance.randrange(100))
            case ["train"] if machine.taking is not None and machine.taking.done():
                machine.train(unfinished=chance.random() < 0.1)
            case ["live"] if machine.syncing and (machine.draining is None or machine.draining.done()):
                machine.weights_go_live()
            case ["memory"]:
                machine.memory(full=chance.random() < 0.2)
            case _:
                continue
        machine.counters_are_what_happened()
        machine.the_quota_is_respected()
        machine.nobody_waits_for_what_has_happened()
    machine.teardown()
    return machine.step


@pytest.mark.slow
def test_a_hundred_thousand_operations_in_long_runs() -> None:
    Loop.operations = 0
    trained = []

    @settings(max_examples=600, deadline=None, database=None, phases=[Phase.generate])
    @given(seed=st.integers(0, 2**32))
    def play_each(seed: int) -> None:
        trained.append(play(seed, 800))

    play_each()
    assert Loop.operations >= 100_000
    assert sum(steps > 10 for steps in trained) > 100


def test_some_long_runs() -> None:
    assert max(play(seed, 400) for seed in range(12)) > 10


@pytest.mark.slow
def test_operations_in_any_order() -> None:
    few = settings(max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Loop, settings=few)  # type: ignore[no-untyped-call]
