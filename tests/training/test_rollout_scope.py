"""Tests that a rollout's completers, forks and requests end with it, before training needs the devices."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import pytest

from rllm_core.config import RunConfig
from rllm_core.engine import Completer, EngineError
from rllm_core.hosts.inline import Inline
from rllm_core.limits import timeouts as deadlines
from rllm_core.scope import RolloutEnded
from rllm_core.training.rollouts import RolloutKey, RolloutRunner
from rllm_core.types import Episode, Step, Task, TerminationReason, Trajectory
from rllm_devkit.scripted import Script, ScriptedColocatedBackend, ScriptedEngine, ScriptedWorkflow

QUESTION = [{"role": "user", "content": "say yes"}]


class Devices:
    """State of the devices, and the number of calls made without owning them."""

    def __init__(self) -> None:
        self.are_training = False
        self.requests = 0
        self.intrusions = 0


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    """Counts the samples a colocated engine draws while training owns the devices."""
    devices, sample = Devices(), ScriptedEngine.get_token_outputs_from_token_input
    enter_training, enter_generation = (
        ScriptedColocatedBackend.enter_training,
        ScriptedColocatedBackend.enter_generation,
    )

    async def watched(self: ScriptedEngine, *arguments: Any, **options: Any) -> Any:
        devices.requests += len(options["seeds"])
        devices.intrusions += devices.are_training
        try:
            return await sample(self, *arguments, **options)
        finally:
            devices.intrusions += devices.are_training

    async def begins(self: Any) -> None:
        devices.are_training = True
        await enter_training(self)
        await asyncio.sleep(0.005)

    async def ends(self: Any) -> None:
        devices.are_training = False
        await enter_generation(self)

    monkeypatch.setattr(ScriptedEngine, "get_token_outputs_from_token_input", watched)
    monkeypatch.setattr(ScriptedColocatedBackend, "enter_training", begins)
    monkeypatch.setattr(ScriptedColocatedBackend, "enter_generation", ends)
    monkeypatch.setattr(
        ScriptedColocatedBackend, "script", Script(latency_seconds=lambda generator: generator.uniform(0, 0.02))
    )
    return devices


async def first_of_two(workflow: ScriptedWorkflow, task: Task, completer: Completer) -> Episode:
    racing = [asyncio.ensure_future(completer.fork().complete(QUESTION)) for _ in range(2)]
    done, _ = await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
    step = next(iter(done)).result()
    return workflow.episode(task, [step], reward=float(step.text == "yes"))


async def siblings_of_a_failure(workflow: ScriptedWorkflow, task: Task, completer: Completer) -> Episode:
    async def agent(number: int, fork: Completer) -> Any:
        if number == 0 and completer.seed % 3 == 0:
            raise ValueError("a bug in one of three agents")
        return await fork.complete([{"role": "user", "content": f"agent {number}"}])

    steps = await asyncio.gather(*(agent(number, completer.fork()) for number in range(3)))
    trajectories = [
        Trajectory(role=f"agent {n}", steps=[s], reward=float(s.text == "yes")) for n, s in enumerate(steps)
    ]
    return Episode(task_id=task.task_id, trajectories=trajectories)


@pytest.mark.slow
@pytest.mark.parametrize("run", [first_of_two, siblings_of_a_failure])
def test_no_request_outlives_its_rollout_into_training(
    run_scripted: Any, devices: Devices, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    monkeypatch.setattr(ScriptedWorkflow, "run", run)
    ended = run_scripted("rollout.max_attempts=5", "rollout.quarantine_after_groups=1000", backend="scripted_colocated")
    assert ended.error is None
    assert devices.requests > 100
    assert devices.intrusions == 0


@pytest.mark.slow
def test_training_waits_for_an_engine_that_takes_its_time_to_cancel(
    run_scripted: Any, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedWorkflow, "run", first_of_two)
    watched = ScriptedEngine.get_token_outputs_from_token_input

    async def slow_to_end(self: ScriptedEngine, *arguments: Any, **options: Any) -> Any:
        try:
            return await watched(self, *arguments, **options)
        except asyncio.CancelledError:
            await asyncio.sleep(0.02)  # time in which it releases its slot on the device
            devices.intrusions += devices.are_training
            raise

    monkeypatch.setattr(ScriptedEngine, "get_token_outputs_from_token_input", slow_to_end)
    assert run_scripted("training.steps=3", backend="scripted_colocated").error is None
    assert devices.intrusions == 0


def play(run: Any, **rollout: Any) -> tuple[Any, ScriptedEngine]:
    config = RunConfig.model_validate({"workflow": "say_yes", "rollout": rollout})
    engine = ScriptedEngine()

    async def main() -> Any:
        workflow = ScriptedWorkflow()
        workflow.run = run.__get__(workflow)  # type: ignore[method-assign]
        runner = RolloutRunner(Inline.of(workflow), engine, config, lockstep=False)
        return await runner.run(Task(task_id="task"), RolloutKey("train", 0, 0))

    return asyncio.run(main()), engine


def test_a_completer_that_is_asked_after_its_rollout_says_so() -> None:
    kept: list[Completer] = []
    steps: list[Step] = []

    async def keeps(workflow: ScriptedWorkflow, task: Task, completer: Completer) -> Episode:
        kept.extend([completer, completer.fork()])
        steps.append(await completer.complete(QUESTION))
        return workflow.episode(task, steps, reward=1.0)

    play(keeps)
    kept.append(kept[0].fork())
    for completer in kept:
        for call in (completer.complete(QUESTION), completer.spell(steps[0])):
            with pytest.raises(RolloutEnded, match="rollout train-0-0-0-0 has ended"):
                asyncio.run(call)  # type: ignore[arg-type]


def test_a_task_that_is_still_asking_hears_of_the_end_and_may_go_on() -> None:
    """The task may serve other rollouts too, so it is not cancelled."""
    heard: list[Exception] = []

    async def leaves(workflow: ScriptedWorkflow, task: Task, completer: Completer) -> Episode:
        async def asks() -> None:
            try:
                await completer.fork().complete([{"role": "user", "content": "slowly"}])
            except RolloutEnded as ended:
                heard.append(ended)
            await asyncio.sleep(0)  # a second cancellation would stop it here
            heard.append(RuntimeError("went on"))

        workflow.asking = asyncio.ensure_future(asks())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        return workflow.episode(task, [await completer.complete(QUESTION)], reward=1.0)

    async def slowly(self: ScriptedEngine, prompt: Any, **options: Any) -> Any:
        if b"slowly" in bytes(prompt.astype("uint8")):
            await asyncio.sleep(3600)
        return await sample(self, prompt, **options)

    sample = ScriptedEngine.get_token_outputs_from_token_input
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedEngine, "get_token_outputs_from_token_input", slowly)

        async def main() -> None:
            config = RunConfig.model_validate({"workflow": "say_yes"})
            workflow = ScriptedWorkflow()
            workflow.run = leaves.__get__(workflow)  # type: ignore[method-assign]
            runner = RolloutRunner(Inline.of(workflow), ScriptedEngine(), config, lockstep=False)
            ended = await runner.run(Task(task_id="task"), RolloutKey("train", 0, 0))
            assert ended.episode.termination_reason is TerminationReason.DONE
            await workflow.asking  # type: ignore[attr-defined]
            await runner.idle()

        asyncio.run(main())
    assert [type(error) for error in heard] == [RolloutEnded, RuntimeError]


def test_rollouts_that_end_at_once_do_not_keep_their_steps_until_all_have_ended() -> None:
    steps: list[weakref.ref[Step]] = []
    alive: list[int] = []

    class Turn(ScriptedWorkflow):
        async def run(self, task: Task, completer: Completer) -> Episode:
            step = await completer.complete([{"role": "user", "content": str(completer.seed)}])
            alive.append(sum(step() is not None for step in steps))
            steps.append(weakref.ref(step))
            return self.episode(task, [step], reward=1.0)

    async def main() -> None:
        config = RunConfig.model_validate({"workflow": "say_yes"})
        runner = RolloutRunner(Inline.of(Turn()), ScriptedEngine(), config, lockstep=False)
        await asyncio.gather(*(runner.run(Task(task_id="task"), RolloutKey("train", 0, index)) for index in range(3)))

    asyncio.run(main())
    assert alive == [0, 0, 0]


def test_a_completer_refuses_another_event_loop() -> None:
    async def asks_elsewhere(workflow: ScriptedWorkflow, task: Task, completer: Completer) -> Episode:
        step = await asyncio.to_thread(lambda: asyncio.run(completer.complete(QUESTION)))  # type: ignore[arg-type]
        return workflow.episode(task, [step], reward=1.0)

    ended, _ = play(asks_elsewhere, max_attempts=1)
    assert "asyncio.run_coroutine_threadsafe" in (ended.episode.error or "")


def test_a_rollout_that_ignores_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "GRACE_SECONDS", 0.05)
    going_on: list[asyncio.Event] = []

    async def ignores(workflow: ScriptedWorkflow, task: Task, completer: Completer) -> Episode:
        going_on.append(asyncio.Event())
        while not going_on[-1].is_set():
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue
        raise AssertionError("unreachable")

    async def main() -> Any:
        config = RunConfig.model_validate(
            {"workflow": "say_yes", "rollout": {"rollout_timeout_seconds": 0.05, "max_attempts": 1}}
        )
        workflow = ScriptedWorkflow()
        workflow.run = ignores.__get__(workflow)  # type: ignore[method-assign]
        runner = RolloutRunner(Inline.of(workflow), ScriptedEngine(), config, lockstep=False)
        ended = await runner.run(Task(task_id="task"), RolloutKey("train", 0, 0))
        assert "rollout train-0-0-0-0 of task 'task' at " in runner.whereabouts()
        assert runner.slots.in_use == 0  # another rollout may take the slot
        [stuck] = [task for task in asyncio.all_tasks() if task.get_name().startswith("rollout train-0-0-0-0")]
        going_on[0].set()
        stuck.cancel()
        await asyncio.wait([stuck])
        return ended

    ended = asyncio.run(main())
    assert ended.episode.termination_reason is TerminationReason.TIMEOUT
    assert "test_rollout_scope.py" in ended.episode.error
    assert "ignored its cancellation and is still running" in ended.episode.error


@pytest.mark.slow
def test_validation_rollouts_are_tried_again_and_counted(run_scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, attempts = ScriptedWorkflow.run, dict[str, int]()

    async def fails_at_first(self: ScriptedWorkflow, task: Task, completer: Completer) -> Episode:
        if completer.is_validation:
            attempts[task.task_id] = attempts.get(task.task_id, 0) + 1
            if attempts[task.task_id] % 3:
                raise EngineError("not yet")
        return await run(self, task, completer)

    monkeypatch.setattr(ScriptedWorkflow, "run", fails_at_first)
    ended = run_scripted("training.validation_rollouts=4", "training.validate_every_steps=3")
    assert ended.error is None
    assert [validation["step"] for validation in ended.summary["validation"]] == [0, 3, 6]
    for validation in ended.summary["validation"]:
        assert validation["rollouts"] == 4
        assert validation["failed"] == 0
        assert validation["retries"] == 8
    assert ended.summary["retries"] == 0
    errors = [event for event in ended.lines("events") if event["event"] == "error"]
    assert len(errors) == 24
