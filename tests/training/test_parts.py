"""Tests single parts of the loop: task stream, request merger, metrics, evaluation, journal."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm_core.assembly.parts import assemble, parts_of, workflow_of
from rllm_core.assembly.resolution import load_run_config, resolve_run
from rllm_core.assembly.tasks import TaskStream, spread
from rllm_core.config import RolloutConfig, RunConfig
from rllm_core.engine import Completer, EngineBusy, EngineError, TITOCompleter
from rllm_core.errors import ConfigError
from rllm_core.hosts.inline import Inline
from rllm_core.limits.request_retries import pause_seconds
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.journal import JsonLines, cut_after, read_json_lines
from rllm_core.run_folder.metrics import MetricsAggregator
from rllm_core.runs import evaluation
from rllm_core.training.requests import RequestMerger
from rllm_core.training.rollouts import RolloutKey, RolloutRunner
from rllm_core.types import Episode, Messages, SamplingParams, Task, token_ids
from rllm_devkit.scripted import Script, ScriptedEngine, ScriptedWorkflow

TASKS = [Task(task_id=str(number)) for number in range(7)]


@given(st.integers(0, 100), st.integers(0, 40))
def test_task_stream_is_a_permutation_per_epoch_in_any_order_of_asking(seed: int, start: int) -> None:
    stream, again = TaskStream(TASKS, seed), TaskStream(TASKS, seed)
    forwards = [stream[ordinal].task_id for ordinal in range(start, start + 15)]
    backwards = [again[ordinal].task_id for ordinal in reversed(range(start, start + 15))]
    assert forwards == backwards[::-1]
    assert sorted(stream[ordinal].task_id for ordinal in range(14, 21)) == sorted(task.task_id for task in TASKS)


def test_epochs_differ() -> None:
    stream = TaskStream([Task(task_id=str(number)) for number in range(50)], 0)
    assert [stream[n].task_id for n in range(50)] != [stream[n].task_id for n in range(50, 100)]


@given(st.integers(1, 40))
def test_validation_is_spread_evenly(rollouts: int) -> None:
    plan = spread(TASKS, rollouts)
    assert len(plan) == rollouts
    per_task = [sum(task.task_id == each.task_id for task, _ in plan) for each in TASKS]
    assert max(per_task) - min(per_task) <= 1
    assert len({(task.task_id, index) for task, index in plan}) == rollouts


def ask(merger: RequestMerger, prompt: list[int], seed: int) -> asyncio.Task[Any]:
    params = SamplingParams(stop_token_ids=(257,))
    return asyncio.create_task(
        merger.get_token_output_from_token_input(prompt, sampling_params=params, seed=seed)  # type: ignore[arg-type]
    )


def test_equal_prompts_of_one_tick_become_one_call() -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        merger = RequestMerger(engine, RolloutConfig(max_concurrent_requests=10), lockstep=False)
        answers = await asyncio.gather(*(ask(merger, [1, 2], seed) for seed in range(8)), ask(merger, [3], 0))
        assert (engine.calls, engine.requests) == (2, 9)
        alone = [await ask(merger, [1, 2], seed) for seed in range(8)]
        assert [a.to_json() for a in answers[:8]] == [a.to_json() for a in alone], "each keeps its own seed"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("temperature", "lockstep", "calls"), [(1.0, False, [1, 6, 1]), (0.0, False, [1, 1, 1]), (1.0, True, [1, 1, 1])]
)
def test_later_turns_are_merged_where_equal_prompts_are_likely(
    temperature: float, lockstep: bool, calls: list[int]
) -> None:
    async def run() -> None:
        engine = ScriptedEngine(skill=1.0)  # all say the same, so all prompts stay equal
        merger = RequestMerger(engine, RolloutConfig(), lockstep=lockstep)
        made: list[int] = []
        params = SamplingParams(temperature=temperature, stop_token_ids=(257,))
        source = merger.source()
        later_source = source if lockstep else merger.unmerged
        completers = [
            TITOCompleter(engine, sampling_params=params, seed=seed, source=source, later_source=later_source)
            for seed in range(6)
        ]
        messages = Messages([{"role": "user", "content": "hi"}])
        for _ in range(2):
            before = engine.calls
            steps = await asyncio.gather(*(completer.complete(messages) for completer in completers))
            made.append(engine.calls - before)
            messages += [steps[0].response, {"role": "user", "content": "again"}]
        before = engine.calls
        await completers[0].complete_many(messages, 6)
        made.append(engine.calls - before)
        assert made == calls
        assert merger.requests == engine.requests == 18

    asyncio.run(run())


@pytest.mark.parametrize("lockstep", [False, True])
def test_only_what_is_equal_in_everything_is_merged(lockstep: bool) -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        merger = RequestMerger(engine, RolloutConfig(max_concurrent_requests=20), lockstep=lockstep)
        asked = []
        for temperature in (1.0, 0.0):
            for is_validation in (False, True):
                for seed in range(3):  # parameter objects that are equal but not identical
                    params = SamplingParams(temperature=temperature, stop_token_ids=(257,))
                    asked.append(
                        merger.get_token_output_from_token_input(
                            token_ids([1, 2]), sampling_params=params, seed=seed, is_validation=is_validation
                        )
                    )
        await asyncio.gather(*asked)
        assert (engine.calls, engine.requests) == (4, 12)
        assert not merger._pending

    asyncio.run(run())


def test_a_failing_call_fails_each_of_its_requests() -> None:
    async def run() -> None:
        engine = ScriptedEngine(script=Script(failure=lambda _: EngineError("down")))
        merger = RequestMerger(engine, RolloutConfig(max_concurrent_requests=10), lockstep=False)
        results = await asyncio.gather(*(ask(merger, [1], seed) for seed in range(3)), return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)

    asyncio.run(run())


def test_a_busy_engine_is_asked_again_after_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def no_time(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def run(failures: int, **limits: Any) -> Any:
        busy = EngineBusy("429", retry_after_seconds=8.0)
        engine = ScriptedEngine(script=Script(failure=lambda number: busy if number <= failures else None))
        merger = RequestMerger(engine, RolloutConfig(**limits), lockstep=False)
        return await ask(merger, [1], 5)

    monkeypatch.setattr("rllm_core.limits.request_retries.asyncio.sleep", no_time)
    assert asyncio.run(run(4)).weight_version == 0
    assert len(pauses) == 4
    assert all(4.0 <= pause <= 12.0 for pause in pauses), "the engine asked for 8 seconds"
    with pytest.raises(EngineBusy, match="429"):
        asyncio.run(run(100, max_request_attempts=3))
    assert len(pauses) == 4 + 2


def test_pauses_grow_are_bounded_and_differ_between_requests() -> None:
    pauses = [pause_seconds(attempt, seed=1) for attempt in range(1, 20)]
    assert all(0.25 * 2**n <= pause <= 0.75 * 2**n for n, pause in enumerate(pauses[:6]))
    assert max(pauses) <= 45.0
    assert len({pause_seconds(1, seed=seed) for seed in range(20)}) == 20
    assert pauses == [pause_seconds(attempt, seed=1) for attempt in range(1, 20)]


def test_an_engine_that_does_not_answer_is_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm_core.limits.request_retries.FIRST_PAUSE_SECONDS", 0.001)

    async def run() -> None:
        engine = ScriptedEngine(script=Script(latency_seconds=lambda _: 3600.0))
        limits = RolloutConfig(request_timeout_seconds=0.02, max_request_attempts=3)
        with pytest.raises(EngineBusy, match=r"did not answer within 0\.02 s"):
            await ask(RequestMerger(engine, limits, lockstep=False), [1], 0)
        assert engine.calls == 3

    asyncio.run(run())


def test_one_request_that_gives_up_does_not_take_the_others_with_it() -> None:
    async def run() -> None:
        engine = ScriptedEngine(script=Script(latency_seconds=lambda _: 0.02))
        merger = RequestMerger(engine, RolloutConfig(max_concurrent_requests=10), lockstep=False)
        first, second = ask(merger, [1], 0), ask(merger, [1], 1)
        await asyncio.sleep(0.005)
        first.cancel()
        assert (await second).weight_version == 0
        assert first.cancelled()

    asyncio.run(run())


@pytest.mark.parametrize("others", [0, 1, 3])
def test_the_request_that_came_first_may_give_up_in_its_own_tick(others: int) -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        merger = RequestMerger(engine, RolloutConfig(max_concurrent_requests=10), lockstep=False)
        first, *rest = (ask(merger, [1], seed) for seed in range(others + 1))
        asyncio.get_running_loop().call_soon(first.cancel)  # by then all calls are queued and none has been sent
        answers = (await asyncio.gather(first, *rest, return_exceptions=True))[1:]
        assert first.cancelled()
        assert (engine.calls, engine.requests) == (min(others, 1), others)
        alone = [await ask(merger, [1], seed) for seed in range(1, others + 1)]
        assert answers == alone, "each keeps its own seed"
        assert not merger._pending

    asyncio.run(run())


def test_a_request_alone_is_stopped_in_the_engine_when_its_rollout_is() -> None:
    async def run() -> None:
        engine = ScriptedEngine(script=Script(latency_seconds=lambda _: 3600.0))
        merger = RequestMerger(engine, RolloutConfig(max_concurrent_requests=1), lockstep=False)
        first = ask(merger, [1], 0)
        await asyncio.sleep(0.005)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        engine.script = Script()
        assert (await asyncio.wait_for(ask(merger, [2], 0), 60)).weight_version == 0, "its place is free again"

    asyncio.run(run())


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda outputs: 2 * outputs, "returned {twice} instead of {requests} completions"),
        (lambda outputs: None, "returned NoneType instead of {requests} completions"),
        (iter, "returned list_iterator instead of {requests} completions"),
        (asyncio.CancelledError, "cancelled the call itself"),
    ],
)
def test_an_engine_with_a_wrong_answer_has_failed(requests: int, change: Callable[..., Any], said: str) -> None:
    class Wrong(ScriptedEngine):
        async def get_token_outputs_from_token_input(self, *args: Any, **options: Any) -> Any:
            answer = change(await super().get_token_outputs_from_token_input(*args, **options))
            if isinstance(answer, BaseException):
                raise answer
            return answer

    async def run() -> None:
        merger = RequestMerger(Wrong(), RolloutConfig(), lockstep=False)
        results = await asyncio.gather(*(ask(merger, [1], n) for n in range(requests)), return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineError)
            assert said.format(twice=2 * requests, requests=requests) in str(result)

    asyncio.run(run())


@pytest.mark.parametrize(("requests", "together"), [(512, 1), (1024, 4), (1100, 3), (511, 1)])
def test_what_answers_leave_behind_is_collected_though_more_is_freed_than_made(requests: int, together: int) -> None:
    collected: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collected.append(info["generation"])

    async def run() -> None:
        merger = RequestMerger(ScriptedEngine(), RolloutConfig(), lockstep=False)
        for first in range(0, requests, together):
            asked = min(together, requests - first)
            await asyncio.gather(*(ask(merger, [1], first + n) for n in range(asked)))

    gc.disable()
    gc.callbacks.append(note)
    try:
        asyncio.run(run())
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert collected == [1] * (requests // 512)


def test_concurrent_calls_are_bounded() -> None:
    async def run() -> None:
        running = most = 0

        class Counting(ScriptedEngine):
            async def get_token_outputs_from_token_input(self, *args: Any, **options: Any) -> Any:
                nonlocal running, most
                running += 1
                most = max(most, running)
                await asyncio.sleep(0.001)
                running -= 1
                return await super().get_token_outputs_from_token_input(*args, **options)

        merger = RequestMerger(Counting(), RolloutConfig(max_concurrent_requests=3), lockstep=False)
        await asyncio.gather(*(ask(merger, [prompt], 0) for prompt in range(20)))
        assert most == 3

    asyncio.run(run())


@pytest.mark.parametrize("has_parser", [True, False])
def test_rollouts_keep_their_tokens_where_the_engine_takes_tokens(has_parser: bool) -> None:
    given: list[type] = []

    class Notes(ScriptedWorkflow):
        async def run(self, task: Task, completer: Completer) -> Episode:
            given.append(type(completer))
            raise AssertionError

    async def run() -> None:
        engine, workflow = ScriptedEngine(), Notes()
        if not has_parser:
            engine.parser = None
        runner = RolloutRunner(Inline.of(workflow), engine, RunConfig(workflow="notes"), lockstep=False)
        await runner.attempt(workflow.tasks("train")[0], RolloutKey("train", 0, 0))

    asyncio.run(run())
    assert given == [TITOCompleter if has_parser else Completer]


def test_metrics_are_reduced_as_declared() -> None:
    metrics = MetricsAggregator({"a": "mean", "b": "sum", "c": "min", "d": "max", "e": "last"})
    for value in (1.0, 2.0, 6.0):
        for name in "abcde":
            metrics.record(name, value)
    assert metrics.flush() == {"a": 3.0, "b": 9.0, "c": 1.0, "d": 6.0, "e": 6.0}
    assert metrics.flush() == {}
    with pytest.raises(KeyError, match="no declared reduction"):
        metrics.record("minutes", 1.0)
    with pytest.raises(ValueError, match="is nan"):
        metrics.record("a", float("nan"))
    with pytest.raises(ValueError, match="declared as 'mean', not 'sum'"):
        metrics.record("a", 1.0, reduction="sum")


def test_pass_at_k_is_the_share_of_subsets_with_a_success() -> None:
    assert evaluation.pass_at_k(4, 1, 1) == pytest.approx(1 / 4)
    assert evaluation.pass_at_k(4, 1, 2) == pytest.approx(3 / 6)
    assert evaluation.pass_at_k(4, 0, 2) == 0
    assert evaluation.pass_at_k(4, 3, 2) == 1
    low, high = evaluation.interval([0.0] * 50 + [1.0] * 50)
    assert 0.38 < low < 0.42
    assert 0.58 < high < 0.62


@pytest.mark.parametrize(("tasks", "limit"), [(1, 0.975), (5, 0.5218), (100, 0.0362)])
def test_equal_values_leave_room_for_tasks_that_were_not_tried(tasks: int, limit: float) -> None:
    assert evaluation.interval([0.0] * tasks) == (0.0, pytest.approx(limit, abs=1e-4))
    assert evaluation.interval([1.0] * tasks) == (pytest.approx(1 - limit, abs=1e-4), 1.0)
    assert evaluation.interval([0.5] * tasks) == (0.5, 0.5)


@pytest.mark.slow
def test_evaluation_of_a_checkpoint(run_scripted: Any, plugins: PluginManager) -> None:
    run = run_scripted("training.steps=20")
    resolved = resolve_run("say_yes", plugins, backend="scripted", engine="scripted")

    def measure(checkpoint: Path | None) -> dict[str, Any]:
        assembly = parts_of(resolved)
        return evaluate(assembly.host, evaluation.engine_of_backend(assembly, checkpoint))

    def evaluate(host: Any, opening: Any) -> dict[str, Any]:
        options: dict[str, Any] = {"split": "validation", "task_limit": 4, "samples": 50, "ks": (1, 5)}
        return asyncio.run(evaluation.evaluate(resolved, host, opening, **options))

    before, after = measure(None), measure(run.path)
    alone = evaluate(Inline.of(workflow_of(resolved)), evaluation.engine_by_name("scripted", resolved))
    assert alone == before, "an engine without a backend plays the same rollouts"
    assert (before["tasks"], before["rollouts_per_task"], before["failed"]) == (4, 50, 0)
    [pass_1, pass_5] = after["pass_at_k"]
    skill = run.lines("metrics")[-1]["skill"]
    assert skill > 0.6
    assert pass_1["low"] <= pass_1["value"] <= pass_1["high"]
    assert pass_1["value"] == pytest.approx(skill, abs=0.15)
    assert pass_1["value"] > before["pass_at_k"][0]["value"]
    assert pass_5["value"] > pass_1["value"]
    with pytest.raises(ConfigError, match="neither a complete checkpoint nor a run folder"):
        measure(run.path / "checkpoints")


def test_lines_are_cut_where_the_checkpoint_was_made(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = JsonLines(path)
    lines.write({"n": 1})
    offset = lines.sync()
    lines.write({"n": 2})
    lines.close()
    with path.open("ab") as file:
        file.write(b'{"n": 3')
    assert read_json_lines(path) == [{"n": 1}, {"n": 2}]
    cut_after(path, offset, tmp_path / "lost" / "events.jsonl")
    assert read_json_lines(path) == [{"n": 1}]
    assert (tmp_path / "lost" / "events.jsonl").read_bytes() == b'{"n":2}\n{"n": 3'
    with pytest.raises(ValueError, match="but had 100 when the checkpoint was saved"):
        cut_after(path, 100, tmp_path / "lost" / "more.jsonl")


def test_dry_run_allocates_nothing_and_prints_what_follows(plugins: PluginManager) -> None:
    config = load_run_config("say_yes", plugins, backend="scripted", overrides=["training.groups_per_step=6"])
    assembly = assemble(config, plugins)
    assert assembly.backend.rollout_engine is None  # type: ignore[attr-defined]
    assert json.loads(json.dumps(config.derived()))["rollouts_per_step"] == 48


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "algorithm.loss=gspo",
            "algorithm.loss = 'gspo' is not supported by backend 'scripted', which supports: cross_entropy, reinforce",
        ),
        ("algorithm.aggregation=sequence_mean_token_sum", "algorithm.aggregation = 'sequence_mean_token_sum' is not"),
        ("algorithm.name=grppo", "grpo"),
        ('requires=["rllm-verl>=9"]', "rllm-verl"),
    ],
)
def test_what_the_backend_cannot_honour_is_refused(plugins: PluginManager, override: str, message: str) -> None:
    from rllm_core.errors import UserError

    with pytest.raises(UserError) as caught:
        assemble(load_run_config("say_yes", plugins, backend="scripted", overrides=[override]), plugins)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_colocated_backend_refuses_asynchrony(plugins: PluginManager) -> None:
    config = load_run_config(
        "say_yes", plugins, backend="scripted_colocated", overrides=["training.staleness_threshold=1"]
    )
    with pytest.raises(ConfigError, match="take turns"):
        assemble(config, plugins)
