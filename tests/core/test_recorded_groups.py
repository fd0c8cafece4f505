"""Tests of recorded groups: a line restores every episode without loss, in at most half of the bytes."""

from __future__ import annotations

import json
import pickle
import re
import zlib
from base64 import b64decode, b64encode
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm_core.run_folder.groups import MEASURES, RecordedGroup, RecordedRollout, chosen
from rllm_core.tokens import logprobs, packed, token_ids, unpacked
from rllm_core.types import Episode, Floats, PlacedMedia, Step, Task, TerminationReason, Trajectory


def episode(index: int, *, turns: int = 3, breaks: bool = False, seed: int = 0) -> Episode:
    rng = np.random.default_rng((seed, index))
    ids = list(np.random.default_rng(seed).integers(0, 150_000, 50))
    messages: list[dict[str, object]] = [{"role": "user", "content": "sort the letters d b a c, please"}]
    steps = []
    for turn in range(turns):
        if breaks and turn == 1:
            ids = list(rng.integers(0, 150_000, 70))
        sampled = rng.integers(0, 150_000, 40)
        answer = {"role": "assistant", "content": f"attempt {index}.{turn} " * 8}
        steps.append(
            Step(
                messages=list(messages),
                response=answer,
                prompt_ids=ids,
                completion_ids=sampled,
                logprobs=-np.abs(rng.normal(size=40)),
                weight_version=turn,
                segment=int(breaks and turn > 0),
                break_reason="prefix_mismatch" if breaks and turn == 1 else None,
                reward=0.5 * turn,
                metadata={"turn": turn},
            )
        )
        messages += [answer, {"role": "tool", "content": f"result {turn}"}]
        ids = [*ids, *sampled, *rng.integers(0, 150_000, 9)]
    return Episode(
        task_id="task-7",
        rollout_id=f"7-{index}-0",
        rollout_index=index,
        trajectories=[Trajectory(steps=steps, reward=float(index))],
        is_correct=index % 2 == 0,
        metrics={"length": 3.0},
    )


def group(episodes: list[Episode], **changes: object) -> RecordedGroup:
    rollouts = [RecordedRollout(each, "trained", "trained") for each in episodes]
    fields: dict[str, object] = {
        "step": 4,
        "group": 187,
        "task": Task(task_id="task-7", data={"letters": "dbac", "answer": "abcd"}),
        "kept": "best",
        "outcome": "trained",
        "reason": "trained",
        "weight_version": 3,
        "rollouts": rollouts,
    }
    return RecordedGroup(**fields | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("breaks", [False, True])
def test_a_line_restores_every_episode(breaks: bool) -> None:
    before = group([episode(index, breaks=breaks) for index in range(4)])
    after = RecordedGroup.from_json(before.to_json())
    assert [rollout.episode for rollout in after.rollouts] == [rollout.episode for rollout in before.rollouts]
    assert after.task == before.task
    assert (after.step, after.group, after.kept, after.weight_version) == (4, 187, "best", 3)


def tool(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "description": "adds up", "parameters": {}}}


@pytest.mark.parametrize(
    "offered",
    [
        [[tool("add")]] * 3,
        [[tool("add")], [], [tool("add")]],
        [[], [tool("add")], [tool("add"), tool("mul")]],
    ],
)
def test_tools_are_restored_and_written_where_they_change(offered: list[list[dict[str, object]]]) -> None:
    episodes = [episode(index) for index in range(2)]
    for each in episodes:
        for step, tools in zip(each.trajectories[0].steps, offered, strict=True):
            step.tools = tools  # type: ignore[assignment]
    before = group(episodes)
    after = RecordedGroup.from_json(before.to_json())
    assert [rollout.episode for rollout in after.rollouts] == episodes
    changes = sum(len(now) > 0 and now != earlier for earlier, now in zip([[], *offered], offered, strict=False))
    shared = bool(offered[0])  # the first prompt of the second rollout is that of the first
    assert before.to_json().count("adds up") <= 2 * 2 * changes - shared
    [trajectory] = episodes[0].trajectories
    assert Trajectory.model_validate_json(trajectory.to_json()) == trajectory
    assert pickle.loads(pickle.dumps(trajectory)) == trajectory  # noqa: S301


def test_tools_that_continue_nothing_are_an_error() -> None:
    [trajectory] = episode(0, turns=1).trajectories
    written = trajectory.model_dump()
    written["steps"][0]["tools"] = {"continues": True, "new": []}
    with pytest.raises(ValueError, match="tools that are those of the step before"):
        Trajectory.model_validate(written)


def test_failed_rollouts_and_those_without_steps_are_restored() -> None:
    failed = Episode(
        task_id="task-7", rollout_id="7-1-0", termination_reason=TerminationReason.ERROR, error="ValueError: no"
    )
    empty = Episode(task_id="task-7", trajectories=[Trajectory(), *episode(2).trajectories])
    before = group([failed, empty, episode(0)], outcome="filtered", reason="incomplete_group")
    after = RecordedGroup.from_json(before.to_json())
    assert [rollout.episode for rollout in after.rollouts] == [rollout.episode for rollout in before.rollouts]


def test_the_reward_of_a_rollout_is_that_of_its_trainable_trajectories() -> None:
    """Of a game against a frozen opponent, the mean of both players' rewards would always be 0."""
    steps = episode(0).trajectories[0].steps[:1]
    won = [Trajectory(role="policy", steps=steps, reward=1.0), Trajectory(role="other", reward=-1.0, trainable=False)]
    played = group([Episode(task_id="task-7", trajectories=trajectories) for trajectories in (won, won[1:])])
    assert [rollout.reward for rollout in played.rollouts] == [1.0, None]


@pytest.mark.parametrize(
    "response", [{}, {"content": "no role"}, {"role": "tool", "content": "x"}, {"role": "assistant"}]
)
@pytest.mark.parametrize("version", [None, 0, 3, 9])
@pytest.mark.parametrize("of_group", [None, 3])
def test_unusual_steps_are_restored(response: dict[str, str], version: int | None, of_group: int | None) -> None:
    step = Step(prompt_ids=[1], completion_ids=[5], response=response, weight_version=version)
    unusual = Episode(task_id="of another task", trajectories=[Trajectory(steps=[step, step])])
    after = RecordedGroup.from_json(group([unusual, unusual], weight_version=of_group).to_json())
    assert [rollout.episode for rollout in after.rollouts] == [unusual, unusual]


def test_media_are_restored_without_their_content() -> None:
    image = PlacedMedia(sha256="0" * 64, kind="image", length_tokens=3, start=1)
    step = Step(prompt_ids=[1, 9, 9, 9, 2], prompt_media=(image,), completion_ids=[5])
    after = RecordedGroup.from_json(group([Episode(task_id="t", trajectories=[Trajectory(steps=[step])])]).to_json())
    assert after.rollouts[0].episode.trajectories[0].steps == [step]


def test_another_prompt_of_the_same_task_is_kept() -> None:
    mine, other = episode(0), episode(1, seed=5)
    after = RecordedGroup.from_json(group([mine, other]).to_json())
    assert [rollout.episode for rollout in after.rollouts] == [mine, other]


def test_numbers_of_tokens_are_restored_per_token() -> None:
    constant: list[Floats | None] = [np.full(40, 0.25, np.float32), None, np.full(40, 0.25, np.float32)]
    varying: list[Floats | None] = [None, None, np.linspace(0, 2, 40, dtype=np.float32)]
    numbers = {"corrections": [varying], "trainer_logprobs": [varying], "entropies": [constant]}
    rollout = RecordedRollout(episode(0), "trained", "trained", [constant], **numbers)
    restored = RecordedGroup.from_json(group([], rollouts=[rollout]).to_json()).rollouts[0]
    assert set(MEASURES) == {"advantages", *numbers}
    for name, [before] in {"advantages": [constant], **numbers}.items():
        [after] = getattr(restored, name)
        assert [None if each is None else each.tolist() for each in after] == [
            None if each is None else each.tolist() for each in before
        ]


def test_a_group_takes_at_most_half_of_the_bytes_of_its_episodes() -> None:
    episodes = [episode(index) for index in range(16)]
    assert len(group(episodes).to_json()) <= sum(len(each.to_json()) for each in episodes) / 2


Numbers = st.none() | st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), Numbers, Numbers, Numbers), max_size=6))
@settings(max_examples=60, deadline=None)
def test_values_of_tokens_are_restored_bit_for_bit(rows: list[tuple[Any, ...]]) -> None:
    rollouts = []
    for index, (is_trained, is_sampled, *values) in enumerate(rows):
        step = Step(prompt_ids=[1], completion_ids=[5, 6], logprobs=[-0.5, -1.5] if is_sampled else None)
        whole = Episode(task_id="task-7", rollout_index=index, trajectories=[Trajectory(steps=[step])])
        arrays = {
            name: [[np.array(each, np.float32)]]
            for name, each in zip(MEASURES[1:], values, strict=True)
            if each is not None
        }
        advantages = [[np.zeros(2, np.float32)]] if is_trained else []
        rollouts.append(RecordedRollout(whole, "trained", "trained", advantages, **arrays))
    restored = RecordedGroup.from_json(group([], rollouts=rollouts).to_json()).rollouts
    for before, after in zip(rollouts, restored, strict=True):
        assert after.episode == before.episode
        for name in MEASURES:
            found = [each for each in chain.from_iterable(getattr(after, name)) if each is not None]
            assert [each.tobytes() for each in found] == [each.tobytes() for [each] in getattr(before, name)]


def with_entropies(entropies: list[Floats | None], index: int = 0) -> RecordedRollout:
    advantages: list[Floats | None] = [np.ones(40, np.float32)] * 3
    return RecordedRollout(
        episode(index), "trained", "trained", [advantages], entropies=[entropies] if entropies else []
    )


def test_steps_without_values_stay_without_them() -> None:
    some = np.arange(40, dtype=np.float32)
    line = group([], rollouts=[with_entropies([some, None, some]), with_entropies([], 1)]).to_json()
    assert json.loads(line)["values"]["steps"] == {"entropies": [0, 2]}
    first, second = RecordedGroup.from_json(line).rollouts
    assert [each is None for each in first.entropies[0]] == [False, True, False]
    assert second.entropies == [[None] * 3]
    assert first.trainer_logprobs == ()


def test_what_trainer_and_sampler_have_in_common_is_written_once() -> None:
    rollouts = [
        RecordedRollout(each, "trained", "trained", trainer_logprobs=[[step.logprobs for step in steps]])
        for each in map(episode, range(8))
        for [steps] in [[trajectory.steps for trajectory in each.trajectories]]
    ]
    without = [RecordedRollout(each.episode, "trained", "trained") for each in rollouts]
    assert len(group([], rollouts=rollouts).to_json()) < len(group([], rollouts=without).to_json()) + 250


@pytest.mark.parametrize(
    "planes",
    ["", "ä", "eJw", "AAAA", b64encode(zlib.compress(b"1234")).decode(), b64encode(zlib.compress(bytes(999))).decode()],
)
def test_damaged_values_are_rejected(planes: str) -> None:
    written = json.loads(group([], rollouts=[with_entropies([np.arange(40, dtype=np.float32), None, None])]).to_json())
    written["values"]["planes"] = planes
    with pytest.raises(ValueError, match="values of tokens"):
        RecordedGroup.from_json(json.dumps(written))


def line_of(name: str, number: int) -> str:
    # Groups of sort, calculator, solver_judge and a validation, and one with unusual fields.
    return Path(__file__).with_name(name).read_text(encoding="utf-8").split("\n")[number]


def uncompressed(line: str) -> str:
    """Replaces what is compressed with its bytes, because other builds of zlib compress in other ways."""
    return re.sub('(?<="planes":")[^"]+', lambda found: zlib.decompress(b64decode(found[0])).hex(), line)


@pytest.mark.parametrize("number", range(5))
def test_the_bytes_of_a_line_stay_as_they_are(number: int) -> None:
    line = line_of("recorded_groups.jsonl", number)
    assert uncompressed(RecordedGroup.from_json(line).to_json()) == uncompressed(line)


@pytest.mark.parametrize("number", range(5))
def test_lines_with_values_per_step_are_read(number: int) -> None:
    # Before its first release, version 0.1 wrote the values of each step beside its advantages.
    line = line_of("recorded_groups_earlier.jsonl", number)
    restored = RecordedGroup.from_json(line)
    for rollout, row in zip(restored.rollouts, json.loads(line)["rollouts"], strict=True):
        for name in MEASURES:
            steps = chain.from_iterable(getattr(rollout, name))
            for found, written in zip(steps, chain.from_iterable(row.get(name, [])), strict=True):
                if isinstance(written, str):
                    assert found.tobytes() == unpacked(written).tobytes()
                else:
                    assert (None if found is None else set(found.tolist())) == (
                        None if written is None else {np.float32(written)}
                    )
    assert uncompressed(restored.to_json()) == uncompressed(line_of("recorded_groups.jsonl", number))


def test_the_line_is_plain_json() -> None:
    written = json.loads(group([episode(0), episode(1)]).to_json())
    assert written["task"] == {"task_id": "task-7", "data": {"letters": "dbac", "answer": "abcd"}}
    assert written["rollouts"][1]["episode"]["is_correct"] is False
    assert "prompt_ids" not in written["rollouts"][1]["episode"]["trajectories"][0]["steps"][0], "shared"


@given(st.lists(st.integers(0, 2**31 - 1)))
@settings(max_examples=50)
def test_packed_ids_are_the_same_ids(ids: list[int]) -> None:
    assert token_ids(packed(token_ids(ids))).tolist() == ids


@given(st.lists(st.floats(max_value=0, allow_infinity=False, allow_nan=False, width=32)))
@settings(max_examples=50)
def test_packed_numbers_are_the_same_numbers(numbers: list[float]) -> None:
    array = logprobs(numbers)
    assert unpacked(packed(array)).tobytes() == array.tobytes()


@pytest.mark.parametrize("text", ["", "1 2 3", "<f8:AAAA", "<f4:A", "<f4:AAA=", "<u1:é", "<i4:AAAAAAA="])
def test_damaged_numbers_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="packed numbers"):
        unpacked(text)


def of_rewards(rewards: list[list[float]], groups: int, turn: int) -> list[tuple[int, str]]:
    return chosen(rewards.__getitem__, len(rewards), groups, turn)


@pytest.mark.parametrize(
    ("turn", "expected"),
    [(0, [(0, "first")]), (1, [(1, "best")]), (2, [(3, "worst")]), (3, [(2, "divided")]), (4, [(0, "first")])],
)
def test_rules_take_turns(turn: int, expected: list[tuple[int, str]]) -> None:
    rewards = [[0.5, 0.5], [1.0, 0.9], [0.0, 1.0], [0.0, 0.1]]
    assert of_rewards(rewards, 1, turn) == expected


def test_several_groups_are_different_ones() -> None:
    assert of_rewards([[1.0, 0.0], [0.0, 0.0], [0.2, 0.2]], 4, 0) == [(0, "first"), (2, "best"), (1, "worst")]
    assert of_rewards([[1.0], [1.0]], 2, 1) == [(0, "worst"), (1, "divided")]


def test_groups_without_rewards_are_taken_in_their_order() -> None:
    assert of_rewards([[], []], 1, 1) == [(0, "first")]
    assert of_rewards([], 1, 1) == []
