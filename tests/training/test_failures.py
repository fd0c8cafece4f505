"""Tests failing rollouts: isolated, retried, counted, never turned into a reward."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks import virtual_clock
from rllm_core.backend import UpdateResult
from rllm_core.config import RolloutConfig, RunConfig
from rllm_core.engine import Completer, EngineError, Terminated
from rllm_core.errors import ConfigError, PluginError, RunError, StallError, UserError
from rllm_core.hosts.inline import Inline
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.first_failures import FirstFailures
from rllm_core.runs import launch
from rllm_core.training.accounting import Books
from rllm_core.training.failures import CircuitBreaker, Quarantine
from rllm_core.training.group import Group
from rllm_core.training.rollouts import RolloutKey, RolloutRunner
from rllm_core.types import Episode, Step, Task, TerminationReason, Trajectory
from rllm_core.workflow import Workflow
from rllm_devkit.scripted import ByteParser, Script, ScriptedBackend, ScriptedEngine, ScriptedWorkflow


class Misbehaving(Workflow):
    """Workflow whose behavior is given by the task id."""

    name = "misbehaving"

    def tasks(self, split: Any) -> list[Task]:
        return []

    async def run(self, task: Task, completer: Completer) -> Episode:
        step = await completer.complete([{"role": "user", "content": "say yes"}])
        match task.task_id:
            case "raise":
                raise ZeroDivisionError("reward is broken")
            case "hang":
                await asyncio.sleep(3600)
            case "none":
                return None  # type: ignore[return-value]
            case "other_task":
                return Episode(task_id="another", trajectories=[Trajectory(steps=[step], reward=1.0)])
            case "no_trajectory":
                return Episode(task_id=task.task_id)
            case "one_step":
                return self.episode(task, step, reward=1.0)  # type: ignore[arg-type]
            case "not_awaited":
                coroutine = asyncio.sleep(0)
                coroutine.close()
                return self.episode(task, [step, coroutine], reward=1.0)  # type: ignore[list-item]
            case "call_not_awaited":
                coroutine = asyncio.sleep(0)
                coroutine.close()
                return self.episode(task, [step], reward=coroutine.text)  # type: ignore[attr-defined]
            case "unknown_reason":
                return self.episode(task, [step], reward=1.0, termination_reason="finished")  # type: ignore[arg-type]
            case "nameless_metric":
                return self.episode(task, [step], reward=1.0, metrics={"": 1.0})
            case "no_reward":
                return self.episode(task, [step])
            case "terminate":
                raise Terminated(TerminationReason.MAX_TURNS, "enough")
            case "own_timeout":
                raise TimeoutError("a tool timed out")
            case "nan" | "inf" | "str" | "bool":
                reward: Any = {"nan": float("nan"), "inf": float("inf"), "str": "1", "bool": True}[task.task_id]
                return self.episode(task, [step], reward=reward)
        return self.episode(task, [step], reward=1.0)


def play(task_id: str, script: Script | None = None, **rollout: Any) -> Episode:
    config = RunConfig.model_validate({"workflow": "misbehaving", "rollout": rollout})

    async def run() -> Episode:
        runner = RolloutRunner(Inline.of(Misbehaving()), ScriptedEngine(script=script), config, lockstep=False)
        return (await runner.attempt(Task(task_id=task_id), RolloutKey("train", 3, 1))).episode

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("task_id", "reason", "error"),
    [
        ("raise", "error", "ZeroDivisionError: reward is broken"),
        ("none", "error", "returned NoneType, not an Episode"),
        ("other_task", "error", "episode of task 'another'"),
        ("no_trajectory", "done", "no trajectory"),
        ("one_step", "error", "steps is one Step; it must be a list of what completer.complete() returned"),
        ("not_awaited", "error", "steps is a list with Step, coroutine; it must be"),
        ("call_not_awaited", "error", "has no attribute 'text'; is an await missing"),
        ("nameless_metric", "error", "a metric has no name"),
        ("unknown_reason", "error", "or 'worker_lost', got 'finished'"),
        ("no_reward", "error", "has no reward"),
        ("terminate", "max_turns_exceeded", "enough"),
        ("nan", "error", "finite"),
        ("inf", "error", "finite"),
        ("str", "error", "Trajectory.reward: expected a finite number or a bool, got str '1'"),
    ],
)
def test_whatever_goes_wrong_is_an_episode_with_a_reason_and_no_reward(task_id: str, reason: str, error: str) -> None:
    episode = play(task_id)
    assert episode.termination_reason.value == reason
    assert episode.trajectories == []
    assert episode.error is not None
    assert error in episode.error
    assert episode.rollout_index == 1
    assert episode.rollout_id


class Plain(Workflow):
    """Without a name, as a class in a file may be."""

    returned: Any = None

    def tasks(self, split: Any) -> list[Task]:
        return []

    def run(self, task: Task, completer: Completer) -> Any:
        return self.returned


class Unreturned(Plain):
    async def run(self, task: Task, completer: Completer) -> Any:
        return None


class Yielding(Plain):
    async def run(self, task: Task, completer: Completer) -> Any:
        yield Episode(task_id=task.task_id)


@pytest.mark.parametrize(
    ("workflow", "error"),
    [
        (Yielding, "run() must return the episode, but it has a yield"),
        (Plain, "run() must be a coroutine function (async def run), but returned NoneType without one"),
        (Unreturned, "returned NoneType, not an Episode"),
        (Unreturned, "(run() of workflow 'Unreturned', "),
    ],
)
def test_what_run_has_to_return_is_told(workflow: type[Workflow], error: str) -> None:
    config = RunConfig.model_validate({"workflow": "w"})
    runner = RolloutRunner(Inline.of(workflow()), ScriptedEngine(), config, lockstep=False)
    failed = asyncio.run(runner.attempt(Task(task_id="1"), RolloutKey("train", 0, 0)))
    assert error in str(failed.episode.error)
    assert failed.is_final, "the next attempt would end in the same way"


def test_a_rollout_past_its_deadline_is_a_timeout() -> None:
    assert play("hang", rollout_timeout_seconds=0.05).termination_reason is TerminationReason.TIMEOUT


def test_each_of_many_rollouts_has_its_own_deadline() -> None:
    """Some rollouts hang, some do not, some start later; a workflow's own timeouts are left alone."""

    class Mixed(Misbehaving):
        async def run(self, task: Task, completer: Completer) -> Episode:
            if task.task_id.startswith("own"):
                async with asyncio.timeout(0.01):
                    await asyncio.sleep(3600)
            return await super().run(task, completer)

    async def run() -> list[str]:
        config = RunConfig.model_validate({"workflow": "m", "rollout": {"rollout_timeout_seconds": 0.2}})
        runner = RolloutRunner(Inline.of(Mixed()), ScriptedEngine(), config, lockstep=False)

        async def play(name: str, after: float) -> str:
            await asyncio.sleep(after)
            episode = (await runner.attempt(Task(task_id=name), RolloutKey("train", 0, 0))).episode
            return episode.termination_reason.value

        wanted = [("hang", 0.0), ("fine", 0.0), ("own", 0.0), ("hang", 0.15), ("fine", 0.15), ("fine", 0.25)]
        results = await asyncio.gather(*(play(name, after) for name, after in wanted))
        later = await play("hang", 0.0)
        return [*results, later]

    assert virtual_clock.run(run()) == ["timeout", "done", "timeout", "timeout", "done", "done", "timeout"]


def test_a_rollout_that_an_engine_keeps_waiting_names_the_engine() -> None:
    async def run(task_id: str, script: Script | None = None) -> str | None:
        config = RunConfig.model_validate({"workflow": "m", "rollout": {"rollout_timeout_seconds": 60.0}})
        runner = RolloutRunner(Inline.of(Misbehaving()), ScriptedEngine(script=script), config, lockstep=False)
        return (await runner.attempt(Task(task_id=task_id), RolloutKey("train", 0, 0))).episode.error

    at = r"the rollout took longer than 60 s; it waited at .*\.py:\d+ in \w+\(\)"
    never = Script(latency_seconds=lambda generator: 3600.0)
    assert re.fullmatch(at + " for engine 'scripted'", virtual_clock.run(run("raise", never)) or "")
    assert re.fullmatch(at, virtual_clock.run(run("hang")) or "")


def test_cancelling_a_rollout_is_not_a_timeout() -> None:
    async def run() -> None:
        config = RunConfig.model_validate({"workflow": "m"})
        runner = RolloutRunner(Inline.of(Misbehaving()), ScriptedEngine(), config, lockstep=False)
        task = asyncio.create_task(runner.run(Task(task_id="hang"), RolloutKey("train", 0, 0)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_an_engine_error_is_told_from_a_workflow_error() -> None:
    episode = play("fine", Script(failure=lambda _: EngineError("503 overloaded")))
    assert episode.termination_reason is TerminationReason.ENGINE_ERROR
    assert episode.error == "503 overloaded"


def test_a_good_episode_gets_its_identity() -> None:
    episode = play("fine")
    assert episode.termination_reason is TerminationReason.DONE
    assert episode.trajectories[0].total_reward == 1.0
    assert not episode.is_validation


@pytest.mark.slow
def test_failed_rollouts_are_tried_again_from_scratch(run_scripted: Any) -> None:
    def fail_every_tenth(assembly: Any) -> None:
        assembly.backend.script.failure = lambda number: EngineError("down") if number % 10 == 0 else None

    try:
        run = run_scripted(prepare=fail_every_tenth)
    finally:
        from rllm_devkit.scripted import ScriptedBackend

        ScriptedBackend.script.failure = None
    assert run.error is None
    assert run.summary["retries"] > 0
    assert run.summary["books"]["trained"] == 96
    assert run.summary["books"]["failed"] == 0


@pytest.mark.slow
def test_a_group_with_a_hopeless_rollout_is_dropped_and_replaced(
    run_scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ScriptedWorkflow.run

    async def poisoned(self: Any, task: Task, completer: Completer) -> Episode:
        if task.task_id == "train-7":
            raise ValueError("poison")
        return await original(self, task, completer)

    monkeypatch.setattr(ScriptedWorkflow, "run", poisoned)
    run = run_scripted("training.steps=5", "rollout.max_attempts=2")
    assert run.error is None
    books = run.summary["books"]
    assert books["trained"] == 5 * 16
    assert books["failed"] == 4
    assert run.summary["books_by_reason"]["failed"] == {"error": 4}
    errors = [event for event in run.lines("events") if event["event"] == "error"]
    assert len(errors) == 8
    assert all(event["task"] == "train-7" and "poison" in event["error"] for event in errors)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], bool]], None]:
    """Returns ``poison(is_poison)``, which makes every rollout of matching tasks raise."""
    original = ScriptedWorkflow.run

    def install(is_poison: Callable[[str], bool]) -> None:
        async def poisoned(self: Any, task: Task, completer: Completer) -> Episode:
            if is_poison(task.task_id):
                raise ValueError(f"poison in {task.task_id}")
            return await original(self, task, completer)

        monkeypatch.setattr(ScriptedWorkflow, "run", poisoned)

    return install


@pytest.mark.slow
def test_a_poison_task_is_set_aside_with_its_last_traceback(
    run_scripted: Any, poison: Any, tmp_path: Any, plugins: PluginManager
) -> None:
    poison(lambda task_id: task_id == "train-3")
    small = ("say_yes.tasks=16", "rollout.max_attempts=1")
    run = run_scripted(*small, "training.steps=14")
    assert run.error is None
    assert run.summary["books"]["trained"] == 14 * 16
    assert run.summary["books"]["failed"] == 2 * 4, "two groups of it were tried, then no more"
    assert list(run.summary["quarantined"]) == ["train-3"]
    trace = run.summary["quarantined"]["train-3"]
    assert "ValueError: poison in train-3" in trace
    assert "in poisoned" in trace
    events = run.lines("events")
    assert [event["task"] for event in events if event["event"] == "quarantine"] == ["train-3"]
    skipped = [event["group"] for event in events if event["event"] == "skip"]
    assert skipped
    assert not {event["group"] for event in events if event["event"] == "dispatch"} & set(skipped)


@pytest.mark.slow
def test_a_quarantine_outlives_a_restart(run_scripted: Any, poison: Any) -> None:
    poison(lambda task_id: task_id == "train-3")
    small = ("say_yes.tasks=16", "rollout.max_attempts=1", "training.checkpoint_every_steps=12", "training.steps=14")

    def stop_late(assembly: Any) -> None:
        original = assembly.backend.update_policy

        async def breaks(step: Any) -> Any:
            if step.step == 14:
                raise OSError("gone")
            return await original(step)

        assembly.backend.update_policy = breaks

    run = run_scripted(*small, prepare=stop_late)
    assert isinstance(run.error, OSError)
    again = run_scripted(*small, resume=True)
    assert again.error is None
    assert again.summary["books"]["failed"] == 2 * 4
    assert list(again.summary["quarantined"]) == ["train-3"]


def test_a_task_that_works_again_is_not_set_aside() -> None:
    quarantine = Quarantine(after_groups=2)
    assert not quarantine.group_lost("a", "first")
    quarantine.group_played("a")
    assert not quarantine.group_lost("a", "second")
    assert quarantine.group_lost("a", "third")
    assert quarantine.tasks == {"a": "third"}
    assert not quarantine.group_lost("a", "fourth"), "it is set aside once"


@pytest.mark.slow
def test_a_run_whose_every_task_fails_says_so(run_scripted: Any, poison: Any) -> None:
    poison(lambda task_id: task_id.startswith("train"))
    run = run_scripted("say_yes.tasks=3", "rollout.max_attempts=1")
    assert isinstance(run.error, RunError)
    assert "every task is in quarantine" in str(run.error)
    assert "poison in train-" in str(run.error)


@pytest.mark.slow
def test_what_the_user_must_mend_ends_the_run_at_once(run_scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wants_images(self: Any, task: Task, completer: Completer) -> Episode:
        raise ConfigError("this parser takes text only")

    monkeypatch.setattr(ScriptedWorkflow, "run", wants_images)
    run = run_scripted("training.validation_rollouts=0")
    assert isinstance(run.error, ConfigError)
    assert str(run.error) == "this parser takes text only"
    assert run.summary["retries"] == 0
    assert isinstance(run_scripted(resume=True).error, ConfigError)


@pytest.mark.slow
def test_an_outage_ends_the_run(run_scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    down = Script(failure=lambda number: EngineError("503 down") if number > 40 else None)
    monkeypatch.setattr(ScriptedBackend, "script", down)
    run = run_scripted("rollout.max_consecutive_failures=20", "training.validation_rollouts=0")
    assert isinstance(run.error, RunError)
    assert str(run.error).startswith("20 consecutive rollout attempts failed (20 engine_error")
    assert "503 down" in str(run.error)
    assert run.summary["status"] == "failed"
    books = run.summary["books"]
    assert books["dispatched"] == sum(books.values()) - books["dispatched"]


def test_a_high_share_of_failures_ends_the_run_too() -> None:
    breaker = CircuitBreaker(RolloutConfig(max_failure_share=0.25))
    good = Episode(task_id="t")
    bad = Episode(task_id="t", termination_reason=TerminationReason.ERROR, error="half of it is broken")
    outcomes = [breaker.record(bad if number % 4 == 0 else good) for number in range(4000)]
    assert set(outcomes) == {None}, "one in four is allowed"
    outcomes = [breaker.record(bad if number % 3 == 0 else good) for number in range(2000)]
    error = next(outcome for outcome in outcomes if outcome is not None)
    assert "251 of the last 1000 rollout attempts failed" in str(error)
    fresh = CircuitBreaker(RolloutConfig(max_failure_share=0.25, max_consecutive_failures=10**6))
    assert {fresh.record(bad) for _ in range(999)} == {None}, "a share of few attempts says nothing"


@pytest.mark.slow
def test_a_run_that_stands_still_ends_with_the_whereabouts_of_its_rollouts(run_scripted: Any) -> None:
    def never(assembly: Any) -> None:
        async def stuck(batch: Any) -> None:
            await asyncio.sleep(3600)

        assembly.backend.process_backend_batch = stuck

    run = run_scripted("training.stall_timeout_seconds=1", prepare=never)
    assert isinstance(run.error, StallError)
    assert "nothing happened for 1 s" in str(run.error)
    assert run.summary["status"] == "failed"
    assert run.summary["books"]["dispatched"] == run.summary["books"]["cancelled"] == 16


@pytest.mark.slow
def test_a_run_that_an_engine_keeps_waiting_names_the_requests(
    run_scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stuck(self: ScriptedEngine, *_: Any, **__: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(ScriptedEngine, "get_token_outputs_from_token_input", stuck)
    run = run_scripted("training.stall_timeout_seconds=1", "training.validation_rollouts=0")
    assert isinstance(run.error, StallError)
    assert re.search(r"; request to engine 'scripted' at .*test_failures.py:\d+ in stuck\(\)", str(run.error))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "limits"),
    [
        ("init_rollout_engine", ("training.backend_timeout_seconds=1",)),
        ("process_backend_batch", ("training.backend_timeout_seconds=1",)),
        ("update_policy", ("training.backend_timeout_seconds=1",)),
        ("save_checkpoint", ("training.backend_timeout_seconds=1",)),
        ("on_policy_updated", ("training.sync_timeout_seconds=1",)),
    ],
)
def test_every_call_of_the_backend_has_a_deadline(run_scripted: Any, method: str, limits: tuple[str, ...]) -> None:
    def hangs(assembly: Any) -> None:
        async def stuck(*arguments: Any) -> None:
            await asyncio.sleep(3600)

        setattr(assembly.backend, method, stuck)

    run = run_scripted(*limits, prepare=hangs, is_begun=method != "init_rollout_engine")
    assert isinstance(run.error, StallError)
    assert str(run.error).startswith(f"{method} of backend 'scripted' did not end within 1 s; it waits at ")
    assert "test_failures.py" in str(run.error)
    assert run.summary["status"] == "failed"


@pytest.mark.slow
def test_a_backend_that_does_not_shut_down_is_left_behind(run_scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SHUTDOWN_TIMEOUT_SECONDS", 0.1)

    def hangs(assembly: Any) -> None:
        async def stuck() -> None:
            await asyncio.sleep(3600)

        assembly.backend.shutdown = stuck

    run = run_scripted(prepare=hangs)
    assert run.error is None
    assert run.summary["status"] == "completed"
    assert run.assembly.left_running


NAN = float("nan")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("init_rollout_engine", None, "init_rollout_engine() returned None, not RolloutEngine"),
        ("update_policy", None, "update_policy() returned None; return an UpdateResult"),
        ("update_policy", UpdateResult([]), "update_policy() returned list, not a mapping"),  # type: ignore[arg-type]
        ("update_policy", UpdateResult({}, []), "return an UpdateResult"),  # type: ignore[arg-type]
        ("update_policy", UpdateResult({"loss": NAN}), "update_policy() has 'loss' = nan"),
        ("update_policy", UpdateResult({"loss": "0.5"}), "update_policy() has 'loss' = '0.5'"),  # type: ignore[dict-item]
        ("update_policy", UpdateResult({"loss": np.ones(3)}), "update_policy() has 'loss' = array"),  # type: ignore[dict-item]
        ("update_policy", UpdateResult({"step": 7.0}), "reports metric 'step', a name of the core"),
        ("update_policy", UpdateResult({"solved": 1.0}), "reports metric 'solved', a name of the core"),
        ("state_dict", None, "state_dict() returned None; return a dict"),
        ("state_dict", {"version": np.int64(3)}, "state_dict() returned a value that is not JSON"),
        ("save_checkpoint", None, "save_checkpoint() wrote nothing and state_dict() is empty"),
    ],
)
def test_a_backend_that_returns_something_else_is_named_and_the_run_can_go_on(
    run_scripted: Any, method: str, answer: Any, said: str
) -> None:
    def wrong(assembly: Any) -> None:
        async def later(*arguments: Any) -> Any:
            return answer

        setattr(assembly.backend, method, (lambda: answer) if method == "state_dict" else later)

    began = method != "init_rollout_engine"
    run = run_scripted(prepare=wrong, is_begun=began)
    assert isinstance(run.error, UserError)
    assert str(run.error).startswith("backend 'scripted'")
    assert said in str(run.error)
    assert run_scripted(resume=began, path=run.path if began else run.path.with_name("again")).error is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("render", "say yes", "render() returned 'say yes', not token ids"),
        ("render", [-1], "render() returned [-1], not token ids"),
        ("render", [], "render() returned no token ids"),
        ("bridge_to_next_turn", ["yes"], "bridge_to_next_turn() returned ['yes'], not token ids"),
        ("parse_completion", "yes", "parse_completion() returned 'yes', not ParsedCompletion"),
        ("count_control_tokens", "0", "count_control_tokens() must return an integer >= 0, got '0'"),
    ],
)
def test_a_parser_that_returns_something_else_is_named_instead_of_the_workflow(
    run_scripted: Any, monkeypatch: pytest.MonkeyPatch, method: str, answer: Any, said: str
) -> None:
    monkeypatch.setattr(ByteParser, method, lambda *_, **options: answer)
    run = run_scripted("training.validation_rollouts=0", "say_yes.turns=2", "rollout.max_consecutive_failures=20")
    assert isinstance(run.error, RunError)
    [failure] = run.summary["failures"]
    assert failure["error"].startswith(f"parser 'bytes': {said}")


@pytest.mark.parametrize("stops", [(), None, "<eos>", ["<eos>"], [-1]])
def test_a_parser_without_stop_tokens_is_refused(
    run_scripted: Any, monkeypatch: pytest.MonkeyPatch, stops: Any
) -> None:
    monkeypatch.setattr(ByteParser, "get_stop_token_ids", lambda self: stops)
    run = run_scripted(is_begun=False)
    assert isinstance(run.error, PluginError)
    assert f"it returned {stops!r}; return the ids that end a turn" in str(run.error)


@pytest.mark.slow
def test_a_failing_weight_sync_stops_the_run(run_scripted: Any) -> None:
    def stale(assembly: Any) -> None:
        original = assembly.backend.on_policy_updated

        async def forgets(update: Any) -> None:
            if update.version < 2:
                await original(update)

        assembly.backend.on_policy_updated = forgets

    run = run_scripted(prepare=stale)
    assert isinstance(run.error, RunError)
    assert "weight version 1, not 2" in str(run.error)


def test_books_notice_what_is_lost_and_what_is_counted_twice() -> None:
    books = Books()
    books.dispatch(8)
    books.book("trained", "trained", 4)
    books.check(outstanding=4)
    with pytest.raises(RunError, match="rollout accounting is inconsistent"):
        books.check(outstanding=3)
    books.book("trained", "trained", 4)
    books.book("failed", "error")
    with pytest.raises(RunError, match="rollout accounting is inconsistent"):
        books.check(outstanding=0)


def test_an_episode_is_taken_in_once() -> None:
    group = Group(0, "t", 0, 2)
    step = Step(prompt_ids=[1], completion_ids=[2], logprobs=[-1.0], weight_version=0)
    episode = Episode(task_id="t", trajectories=[Trajectory(steps=[step], reward=0.0)])
    group.add(episode)
    assert group.running == [1]
    with pytest.raises(ValueError, match="was added twice"):
        group.add(episode)


@pytest.mark.parametrize(
    ("one", "other", "kinds"),
    [
        ("env.py:41: KeyError: 'ab'", 'env.py:41: KeyError: "c\'s"', 1),
        ("500 - {'error': {'message': 'cannot serve a'}}", "500 - {'error': {'message': \"can't serve b\"}}", 1),
        ("the server's reply to req_8fa3 is late", "the server's reply to req_c01 is late", 1),
        ("the server's reply is late", "the server's address is wrong", 2),
        ("env.py:41: KeyError: 'a'", "env.py:41: IndexError: 'a'", 2),
    ],
)
def test_failures_with_other_quotes_and_ids_are_one_kind(one: str, other: str, kinds: int) -> None:
    failures = FirstFailures()
    for error in (one, other, one):
        failures.add("error", error)
    found = failures.to_list()
    assert (found[0]["error"], len(found)) == (one, kinds)
    assert sum(kind["count"] for kind in found) == 3
