"""Tests which groups a run records, and that they hold what was sampled, trained and measured."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm_core.backend import TokenMeasures, UpdateResult
from rllm_core.engine import EngineError
from rllm_core.run_folder.groups import RULES, RecordedGroup
from rllm_core.run_folder.recorded import group_at, index_of, texts_of_tokens, timings_of
from rllm_core.types import TrainingSample
from rllm_devkit.scripted import Script, ScriptedBackend

CORRECTED = ("algorithm.proximal_policy=forward", "algorithm.corrections=['token_tis']")
UNIFORM = "algorithm.filter_uniform_groups=true"


def groups_of(run: Path, outcome: str = "") -> list[RecordedGroup]:
    return [group_at(run, entry) for entry in index_of(run) if outcome in ("", entry.outcome)]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[TrainingSample]]:
    """Collects the samples that the backend trains, by rollout; its proximal policy differs from token to token."""
    samples: dict[str, list[TrainingSample]] = defaultdict(list)
    original = ScriptedBackend.transform_to_backend_batch

    def transform(self: Any, batch: Any) -> Any:
        for sample in batch:
            samples[sample.rollout_id].append(sample)
        return original(self, batch)

    async def compute(self: Any, batch: Any, policy: str = "current") -> Any:
        return [(s.logprobs - 0.1 * (1 + np.arange(len(s.logprobs)) % 3)).astype(np.float32) for s in batch]

    monkeypatch.setattr(ScriptedBackend, "transform_to_backend_batch", transform)
    monkeypatch.setattr(ScriptedBackend, "compute_logprobs", compute)
    monkeypatch.setattr(ScriptedBackend, "capability_overrides", {"policies": frozenset({"proximal"})})
    return samples


def test_the_sampled_entropy_averages_over_all_trained_tokens(
    run_scripted: Any, trained: dict[str, list[TrainingSample]]
) -> None:
    run = run_scripted("training.steps=1")
    (row,) = run.lines("metrics")
    logprobs = [float(value) for samples in trained.values() for sample in samples for value in sample.logprobs]
    assert len(logprobs) == row["sampled_tokens"]
    assert len({len(sample.logprobs) for samples in trained.values() for sample in samples}) > 1
    assert row["sampled_entropy"] == pytest.approx(-sum(logprobs) / len(logprobs))


@pytest.mark.slow
@pytest.mark.parametrize("kept", [1, 3])
def test_groups_are_whole_and_the_rules_take_turns(run_scripted: Any, kept: int) -> None:
    run = run_scripted(f"training.groups_kept_per_step={kept}")
    groups = groups_of(run.path, "trained")
    assert [group.kept for group in groups] == [RULES[number % 4] for number in range(6 * kept)]
    assert [group.step for group in groups] == [step for step in range(1, 7) for _ in range(kept)]
    rewards = defaultdict(list)
    ended = {line["rollout"]: line for line in run.lines("events") if line["event"] == "finish"}
    for line in run.lines("events"):
        if line["event"] == "step":
            rewards[line["step"]] = line["groups"]
    for group in groups:
        assert group.group in rewards[group.step]
        assert [rollout.episode.rollout_index for rollout in group.rollouts] == [0, 1, 2, 3]
        for rollout in group.rollouts:
            [part] = ended[rollout.episode.rollout_id]["trajectories"]
            assert rollout.episode.trajectories[0].total_reward == part["reward"]


@pytest.mark.slow
def test_the_best_group_has_the_highest_mean_reward(run_scripted: Any) -> None:
    run = run_scripted("training.groups_kept_per_step=4")
    by_step = defaultdict(dict)
    for entry in index_of(run.path):
        if entry.outcome == "trained":
            by_step[entry.step][entry.kept] = entry
    assert len(by_step) == 6
    for chosen in by_step.values():  # all four groups of a step
        means = {kept: entry.reward_mean for kept, entry in chosen.items()}
        assert means["best"] == max(mean for kept, mean in means.items() if kept != "first")
        assert means["worst"] == min(mean for kept, mean in means.items() if kept not in ("first", "best"))


@pytest.mark.slow
@pytest.mark.parametrize("corrections", [(), CORRECTED], ids=["plain", "corrected"])
def test_advantages_are_those_that_were_trained(run_scripted: Any, trained: Any, corrections: tuple[str, ...]) -> None:
    run = run_scripted("say_yes.turns=2", *corrections)
    compared = weighted = 0
    for group in groups_of(run.path, "trained"):
        for rollout in group.rollouts:
            sample = {id(s): s for s in trained[rollout.episode.rollout_id]}.popitem()[1]
            [advantages] = rollout.advantages
            assert np.array_equal(np.concatenate(advantages), sample.advantages)
            compared += bool(sample.advantages.any())
            if corrections:
                [proximal] = rollout.trainer_logprobs
                assert np.array_equal(np.concatenate(proximal), sample.proximal_logprobs)
                [weights] = rollout.corrections
                expected = np.exp(-0.1 * (1 + np.arange(len(sample.logprobs)) % 3))
                assert np.concatenate(weights) == pytest.approx(expected, rel=1e-5)
                weighted += len(expected)
            else:
                assert rollout.corrections == ()
                assert rollout.trainer_logprobs == ()
    assert compared > 0
    assert bool(weighted) == bool(corrections)


def reporting(monkeypatch: pytest.MonkeyPatch, measures: Any) -> None:
    """Lets the backend report numbers of the tokens of every second sample."""
    samples: list[TrainingSample] = []
    transform, update = ScriptedBackend.transform_to_backend_batch, ScriptedBackend.update_policy

    def collect(self: Any, batch: Any) -> Any:
        samples.extend(batch)
        return transform(self, batch)

    async def report(self: Any, step: Any) -> UpdateResult:
        result = await update(self, step)
        tokens = {sample.sample_id: measures(sample) for sample in samples[::2]}
        samples.clear()
        return UpdateResult(result.metrics, tokens)

    monkeypatch.setattr(ScriptedBackend, "transform_to_backend_batch", collect)
    monkeypatch.setattr(ScriptedBackend, "update_policy", report)


@pytest.mark.slow
def test_numbers_of_tokens_of_the_backend_are_recorded(run_scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reporting(monkeypatch, lambda sample: TokenMeasures(logprobs=sample.logprobs / 2, entropies=-sample.logprobs))
    run = run_scripted("say_yes.turns=2")
    known = Counter()
    for group in groups_of(run.path, "trained"):
        for rollout in group.rollouts:
            [logprobs], [entropies] = rollout.trainer_logprobs, rollout.entropies
            for step, mine, undecided in zip(rollout.episode.trajectories[0].steps, logprobs, entropies, strict=True):
                known[mine is not None] += 1
                if mine is not None:
                    assert np.array_equal(mine, step.logprobs / 2)
                    assert np.array_equal(undecided, -step.logprobs)
    assert known[True] == known[False] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "measures",
    [
        lambda sample: TokenMeasures(logprobs=sample.logprobs[1:]),
        lambda sample: TokenMeasures(entropies=np.full(sample.sampled_tokens, np.nan, np.float32)),
    ],
    ids=["too few", "not finite"],
)
def test_numbers_that_do_not_fit_end_the_run(run_scripted: Any, monkeypatch: pytest.MonkeyPatch, measures: Any) -> None:
    reporting(monkeypatch, measures)
    run = run_scripted("say_yes.turns=2")
    assert re.match(
        r"update_policy of the backend returned \d+ (trainer logprobs|entropies) for a sample", str(run.error)
    )


@pytest.mark.slow
def test_filtered_groups_leave_fewer_and_fewer_examples(run_scripted: Any) -> None:
    run = run_scripted(UNIFORM)
    filtered = [line["group"] for line in run.lines("events") if line["event"] == "filter"]
    expected = [group for number, group in enumerate(filtered, 1) if number.bit_count() == 1]
    found = groups_of(run.path, "filtered")
    assert len(filtered) > 2
    assert [group.group for group in found] == expected
    assert {group.reason for group in found} == {"uniform_reward"}
    assert all(len({r.episode.trajectories[0].total_reward for r in group.rollouts}) == 1 for group in found)


@pytest.mark.slow
def test_a_failed_group_says_what_failed(run_scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = Script(
        failure=lambda request: EngineError("busy") if request % 9 == 0 else None,
        latency_seconds=lambda random: random.random() / 500,  # so that rollouts ask one by one, and not all fail
    )
    monkeypatch.setattr(ScriptedBackend, "script", fails)
    run = run_scripted("rollout.max_attempts=1", "rollout.max_failure_share=1.0", "rollout.max_consecutive_failures=99")
    assert run.error is None
    found = groups_of(run.path, "failed")
    assert found
    for group in found:
        assert group.reason == "engine_error"
        outcomes = Counter(rollout.outcome for rollout in group.rollouts)
        assert outcomes["failed"] > 0
        assert outcomes["failed"] + outcomes["filtered"] == 4
        errors = [rollout.episode.error for rollout in group.rollouts if rollout.outcome == "failed"]
        assert all("busy" in error for error in errors)


@pytest.mark.slow
def test_every_validation_records_the_same_tasks(run_scripted: Any) -> None:
    run = run_scripted("training.validate_every_steps=2")
    tasks = defaultdict(list)
    for group in groups_of(run.path, "validation"):
        tasks[group.step].append(group.task.task_id)
        assert group.group is None
    assert sorted(tasks) == [0, 2, 4, 6]
    assert len(tasks[0]) == len(set(tasks[0])) == 4
    assert all(found == tasks[0] for found in tasks.values())
    ids = [rollout.episode.rollout_id for group in groups_of(run.path) for rollout in group.rollouts]
    assert len(ids) == len(set(ids))
    assert timings_of(run.path).keys() == set(ids)


def masked(path: Path) -> str:
    return re.sub(r'"step_id":"\w+"|train-\d+|validation-\d+', "", path.read_text())


@pytest.mark.slow
def test_a_resumed_run_records_the_same_groups(run_scripted: Any, tmp_path: Path) -> None:
    def breaks(parts: Any) -> None:
        original = parts.backend.update_policy

        async def update_policy(step: Any) -> Any:
            if step.step == 4:
                raise OSError("the device is gone")
            return await original(step)

        parts.backend.update_policy = update_policy

    settings = ("training.checkpoint_every_steps=2", UNIFORM)
    whole = run_scripted(*settings, path=tmp_path / "whole")
    cut = tmp_path / "cut"
    run_scripted(*settings, path=cut, prepare=breaks)
    assert len(index_of(cut)) > 0
    run_scripted(*settings, path=cut, resume=True)
    assert masked(cut / "groups.jsonl") == masked(whole.path / "groups.jsonl")
    assert (cut / "tokens.jsonl").read_text() == (whole.path / "tokens.jsonl").read_text()


@pytest.mark.slow
def test_the_texts_of_the_tokens_are_those_of_the_answers(run_scripted: Any) -> None:
    run = run_scripted()
    texts = texts_of_tokens(run.path)
    lines = [json.loads(line) for line in (run.path / "tokens.jsonl").read_text().splitlines()]
    assert len(lines) == len(texts)
    for group in groups_of(run.path):
        for rollout in group.rollouts:
            for step in rollout.episode.trajectories[0].steps:
                answer = [texts[token] for token in step.completion_ids.tolist()]
                assert "".join(answer).startswith(step.text)
                assert step.text in ("yes", "no")


@pytest.mark.slow
def test_calls_have_durations(run_scripted: Any) -> None:
    run = run_scripted("say_yes.turns=2")
    timings = timings_of(run.path)
    recorded = [rollout.episode for group in groups_of(run.path) for rollout in group.rollouts]
    assert {episode.rollout_id for episode in recorded} == timings.keys()
    for episode in recorded:
        line = timings[episode.rollout_id]
        assert [call["kind"] for call in line["calls"]] == ["model"] * len(episode.trajectories[0].steps)
        starts = [call["start"] for call in line["calls"]]
        assert starts == sorted(starts)
        assert 0 < sum(call["seconds"] for call in line["calls"]) <= line["seconds"] + 1e-5  # rounded


@pytest.mark.slow
def test_nothing_is_recorded_if_nothing_is_wanted(run_scripted: Any) -> None:
    run = run_scripted("training.groups_kept_per_step=0")
    written = {path.name for path in run.path.iterdir()}
    assert not written & {"groups.jsonl", "groups_index.jsonl", "group_timings.jsonl", "tokens.jsonl"}
    assert "trajectories.jsonl" not in written


def test_rewards_and_tools_have_durations(run_scripted: Any, tmp_path: Path) -> None:
    from rllm_core.scope import CallTimes, timed, timing

    with timed("tool", "outside of a rollout"):
        pass
    calls = CallTimes()
    with timing(calls):
        with pytest.raises(ValueError, match="wrong"), timed("tool", "search"):
            raise ValueError("wrong")
        with timed("reward", "score"):
            pass
        with timed("tool", "half a pair \ud83d"):  # a model can name tools
            pass
    written = calls.to_dict()
    assert [(call["kind"], call["name"]) for call in written["calls"]] == [
        ("tool", "search"),
        ("reward", "score"),
        ("tool", r"half a pair \ud83d"),
    ]
    assert calls.seconds >= sum(call.seconds for call in calls.calls)
