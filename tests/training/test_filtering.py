"""Tests filtered groups: replaced or left out, counted in both cases."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rllm_core.assembly.parts import Parts
from rllm_core.backend import OptimizerStep
from rllm_core.errors import RunError
from rllm_core.run_folder.difficulty import ALL, NONE, SOME, DifficultyCounts
from rllm_core.scope import timed
from rllm_core.types import Episode
from rllm_devkit.scripted import ScriptedBackend, ScriptedBatch, ScriptedEngine
from rllm_viewer.verify import verify

RunScripted = Callable[..., Any]
# Two rollouts agree about half the time.
PAIRS = ("training.rollouts_per_group=2", "training.steps=8", "algorithm.filter_uniform_groups=true")
GO_WITHOUT = (*PAIRS, "algorithm.refill_filtered_groups=false")
ASYNCHRONOUS = ("training.staleness_threshold=1", "training.partial_rollout=true")


def batches_of(assembly: Parts, rounds: Callable[[int], int]) -> list[set[int]]:
    """Lets each rollout's reward take ``rounds`` of the event loop by its number; returns the seeds of each batch."""
    play, init, batches, played = (
        assembly.workflow.run,
        assembly.backend.init_rollout_engine,
        [set()],
        itertools.count(),
    )

    async def run(task: Any, completer: Any) -> Episode:
        episode = await play(task, completer)
        with timed("reward", "slow"):
            for _ in range(rounds(next(played))):
                await asyncio.sleep(0)
        return episode

    async def init_rollout_engine(parser: Any) -> ScriptedEngine:
        engine: ScriptedEngine = await init(parser)
        sample, in_engine = engine.get_token_outputs_from_token_input, set()

        async def get_token_outputs_from_token_input(tokens: Any, *, seeds: Any, **options: Any) -> Any:
            batches[-1] |= {*seeds}
            in_engine.add(id(seeds))
            for _ in range(3):  # the other calls of the batch arrive
                await asyncio.sleep(0)
            in_engine.remove(id(seeds))
            if not in_engine:
                batches.append(set())
            return await sample(tokens, seeds=seeds, **options)

        engine.get_token_outputs_from_token_input = get_token_outputs_from_token_input  # type: ignore[method-assign]
        return engine

    assembly.workflow.run = run  # type: ignore[method-assign]
    assembly.backend.init_rollout_engine = init_rollout_engine  # type: ignore[method-assign]
    return batches


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ("rollout.max_concurrent_rollouts=4",)])
def test_batches_do_not_depend_on_which_group_is_filtered_last(
    run_scripted: RunScripted, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    runs = []
    for name, rounds in (("first", lambda number: 9 * (number % 8)), ("last", lambda number: 9 * (7 - number % 8))):
        found: list[list[set[int]]] = []
        run = run_scripted(
            *PAIRS,
            *overrides,
            "training.validation_rollouts=0",
            backend="scripted_colocated",
            path=tmp_path / name,
            prepare=lambda assembly, rounds=rounds, found=found: found.append(batches_of(assembly, rounds)),
        )
        assert run.error is None
        runs += found
    assert len(runs[0]) > 8 + 1, "some groups were replaced"
    assert runs[0] == runs[1]


def shares(row: dict[str, Any]) -> list[float]:
    return [row["groups_solved_by_none"], row["groups_solved_by_some"], row["groups_solved_by_all"]]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["scripted", "scripted_colocated"])
@pytest.mark.parametrize("overrides", [(), ("training.groups_per_forward_backward=1",)])
def test_a_step_goes_without_what_is_filtered(
    run_scripted: RunScripted, backend: str, overrides: tuple[str, ...]
) -> None:
    run = run_scripted(*GO_WITHOUT, *overrides, backend=backend)
    assert run.error is None
    rows = run.lines("metrics")
    trained = [int(row["groups"]) for row in rows]
    assert 0 < sum(trained) < 8 * 4
    assert run.summary["books"]["dispatched"] == 8 * 4 * 2, "nothing was generated in their place"
    assert run.summary["books_by_reason"] == {
        "trained": {"trained": 2 * sum(trained)},
        "filtered": {"uniform_reward": 2 * (8 * 4 - sum(trained))},
    }
    assert verify(run.path).books["filtered"] == run.summary["books_by_reason"]["filtered"]
    for row, groups in zip(rows, trained, strict=True):
        none, some, all_of_them = shares(row)
        assert (none + some + all_of_them, some) == (pytest.approx(1), groups / 4)
        assert row["reward_mean"] == pytest.approx(some / 2 + all_of_them), "of all, not of what teaches"
        assert row["trajectories"] == row["samples"] == 2 * groups


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ASYNCHRONOUS])
def test_or_others_take_their_place(run_scripted: RunScripted, overrides: tuple[str, ...]) -> None:
    run = run_scripted(*PAIRS, *overrides)
    assert run.error is None
    rows = run.lines("metrics")
    assert [row["groups"] for row in rows] == [4.0] * 8
    assert {row["reward_mean"] for row in rows} == {0.5}, "what teaches says nothing about the policy"
    assert any(row["groups_solved_by_some"] < 1 for row in rows), "what was filtered is judged as well"
    for row in rows:
        assert sum(shares(row)) == pytest.approx(1)
    assert run.summary["books"]["trained"] == 8 * 4 * 2 < run.summary["books"]["dispatched"]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [ASYNCHRONOUS, ("training.staleness_threshold=2", "training.staleness=strict")])
def test_asynchronous_steps_go_without_too(run_scripted: RunScripted, overrides: tuple[str, ...]) -> None:
    run = run_scripted(*GO_WITHOUT, *overrides)
    assert run.error is None
    events = run.lines("events")
    filtered = {event["group"] for event in events if event["event"] == "enqueue" and event["filtered"]}
    stepped = [ordinal for event in events if event["event"] == "step" for ordinal in event["groups"]]
    assert sorted(stepped) == list(range(8 * 4)), "each group once, trained or not"
    assert run.summary["books"]["trained"] == 2 * (8 * 4 - len(filtered)) > 0
    assert sum(row["groups"] for row in run.lines("metrics")) == 8 * 4 - len(filtered)


class CountingBackend(ScriptedBackend):
    """Records the denominators of the loss; rejects empty passes."""

    def transform_to_backend_batch(self, samples: Any) -> ScriptedBatch:
        assert samples
        return super().transform_to_backend_batch(samples)

    async def update_policy(self, step: OptimizerStep) -> Any:
        self.calls.log.append(("counts", step.samples, step.trajectories, step.sampled_tokens))
        return await super().update_policy(step)


@pytest.mark.slow
def test_denominators_count_what_is_trained(run_scripted: RunScripted) -> None:
    def counting(assembly: Parts) -> None:
        assembly.backend.__class__ = CountingBackend

    run = run_scripted(*GO_WITHOUT, prepare=counting)
    counts = [call[1:] for call in run.assembly.backend.calls.log if call[0] == "counts"]
    rows = [row for row in run.lines("metrics") if row["groups"]]
    assert counts == [(row["samples"], row["trajectories"], row["sampled_tokens"]) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["scripted", "scripted_colocated"])
def test_a_step_in_which_nothing_is_left_counts_and_changes_nothing(
    run_scripted: RunScripted, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    def good(self: ScriptedBackend, *_: Any) -> None:
        original(self, *_)
        self.skill = 1.0

    original = ScriptedBackend.__init__
    monkeypatch.setattr(ScriptedBackend, "__init__", good)
    run = run_scripted(*GO_WITHOUT, backend=backend)
    assert run.error is None
    assert run.summary["optimizer_steps"] == 8
    assert not {"process_backend_batch", "update_policy"} & {*run.assembly.backend.calls.names()}
    assert run.summary["books"] == {"dispatched": 64, "trained": 0, "filtered": 64, "failed": 0, "cancelled": 0}
    for number, row in enumerate(run.lines("metrics"), 1):
        assert (row["weight_version"], row["groups"], row["samples"], row["reward_mean"]) == (number, 0, 0, 1)
        assert shares(row) == [0, 0, 1]
    assert "skill" not in run.lines("metrics")[0], "the backend had nothing to say"


@pytest.mark.slow
def test_with_refilling_the_same_policy_ends_the_run(
    run_scripted: RunScripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = ScriptedEngine._answer
    monkeypatch.setattr(ScriptedEngine, "_answer", lambda self, *of_request: answer(self, *of_request[:-1], 1.0))
    run = run_scripted(*PAIRS, "algorithm.max_group_attempts=2")
    assert isinstance(run.error, RunError)
    assert "because too many were filtered" in str(run.error)
    assert run.summary["books"]["trained"] == 0


@pytest.mark.slow
def test_a_group_that_failed_is_replaced_in_any_case(run_scripted: RunScripted) -> None:
    def failing(assembly: Parts) -> None:
        play = assembly.workflow.run

        async def run(task: Any, completer: Any) -> Episode:
            if task.task_id == "train-3":
                raise OSError("the environment is down")
            return await play(task, completer)

        assembly.workflow.run = run  # type: ignore[method-assign]

    run = run_scripted(*GO_WITHOUT, "rollout.max_attempts=1", "rollout.quarantine_after_groups=99", prepare=failing)
    assert run.error is None
    lost = run.summary["books"]["failed"]
    assert lost > 0
    assert run.summary["books"]["dispatched"] == 8 * 4 * 2 + lost


@pytest.mark.slow
def test_rollouts_left_out_for_how_they_ended_may_leave_nothing(run_scripted: RunScripted) -> None:
    run = run_scripted(
        "training.steps=2", "algorithm.refill_filtered_groups=false", 'algorithm.filter_termination_reasons=["done"]'
    )
    assert run.error is None
    assert run.summary["books_by_reason"] == {"filtered": {"termination_reason": 2 * 16}}


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_was_never_stopped(run_scripted: RunScripted, tmp_path: Path) -> None:
    """Filtered groups of the step in progress are judged exactly once."""

    def stops_at(step: int) -> Callable[[Parts], None]:
        def prepare(assembly: Parts) -> None:
            update = assembly.backend.update_policy

            async def update_policy(planned: OptimizerStep) -> Any:
                if planned.step == step:
                    raise RunError("stopped")
                return await update(planned)

            assembly.backend.update_policy = update_policy  # type: ignore[method-assign]

        return prepare

    for number, overrides in enumerate((PAIRS, GO_WITHOUT)):
        whole, stopped = tmp_path / f"whole-{number}", tmp_path / f"stopped-{number}"
        options = (*overrides, "training.checkpoint_every_steps=2")
        assert run_scripted(*options, backend="scripted_colocated", path=whole).error is None
        for step in (4, 7):
            first = run_scripted(
                *options, backend="scripted_colocated", path=stopped, prepare=stops_at(step), resume=step > 4
            )
            assert str(first.error) == "stopped"
        last = run_scripted(*options, backend="scripted_colocated", path=stopped, resume=True)
        assert last.error is None
        assert (stopped / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
        assert verify(stopped).problems == []


@pytest.mark.slow
def test_groups_that_wait_at_a_checkpoint_stay_filtered(run_scripted: RunScripted, tmp_path: Path) -> None:
    """Checkpoints of an asynchronous run may contain groups that a later step filters."""
    path = tmp_path / "run"
    options = (*GO_WITHOUT, "training.staleness_threshold=3", "training.checkpoint_every_steps=1")

    def stopping(assembly: Parts) -> None:
        update = assembly.backend.update_policy

        async def update_policy(planned: OptimizerStep) -> Any:
            await asyncio.sleep(0.05)  # time for generation to run ahead
            if planned.step == 5:
                raise RunError("stopped")
            return await update(planned)

        assembly.backend.update_policy = update_policy  # type: ignore[method-assign]

    first = run_scripted(*options, path=path, prepare=stopping)
    assert str(first.error) == "stopped"
    newest = max(path.glob("checkpoints/step-*"))
    manifest = json.loads((newest / "manifest.json").read_text())
    assert manifest["generation"]["buffered_ordinals"]
    assert run_scripted(*options, path=path, resume=True).error is None
    run = verify(path)
    assert run.problems == []
    assert run.books["filtered"]["uniform_reward"] > 0


def episodes(*is_correct: bool | None) -> list[Episode]:
    return [Episode(task_id="t", is_correct=correct) for correct in is_correct]


def test_difficulty_by_hand() -> None:
    difficulty = DifficultyCounts()
    difficulty.filtered(episodes(True, True))
    difficulty.filtered(episodes(False, False))
    difficulty.filtered(episodes(None, None))
    restored = DifficultyCounts()
    restored.load_state_dict(json.loads(json.dumps(difficulty.state_dict())))
    step = [episodes(False, True), episodes(True, None), episodes(None)]
    assert difficulty.take(step) == restored.take(step) == {NONE: 0.25, SOME: 0.25, ALL: 0.5}
    assert difficulty.take([episodes(False)]) == {NONE: 1, SOME: 0, ALL: 0}, "what was filtered counts once"
    assert difficulty.take([]) == difficulty.take([episodes(None)]) == {}


@pytest.mark.slow
def test_without_is_correct_nobody_says_how_hard_it_was(run_scripted: RunScripted) -> None:
    def silent(assembly: Parts) -> None:
        play = assembly.workflow.run

        async def run(task: Any, completer: Any) -> Episode:
            return (await play(task, completer)).model_copy(update={"is_correct": None})

        assembly.workflow.run = run  # type: ignore[method-assign]

    run = run_scripted("training.steps=1", prepare=silent)
    assert not any(name.startswith("groups_solved") for name in run.lines("metrics")[0])
