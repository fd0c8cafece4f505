"""Tests the conversion of trajectories to samples: no sampled token is lost, merged wrongly or masked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm_core.algorithms.grouping import FilterReason, filter_reason, group_trajectories
from rllm_core.algorithms.samples import per_step, segments, trained_segments, training_samples, with_token_rewards
from rllm_core.types import Episode, Step, Trajectory, TrajectoryGroup


def step(prompt: list[int], completion: list[int], *, sampled: bool = True, segment: int = 0) -> Step:
    return Step(
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[-float(token) / 100 for token in completion] if sampled else None,
        weight_version=0 if sampled else None,
        segment=segment,
    )


def of(*steps: Step) -> TrajectoryGroup:
    trajectory = Trajectory(steps=list(steps), reward=1.0)
    return TrajectoryGroup(group_id=3, task_id="t", trajectories=[trajectory], rollout_ids=["r"], weight_version=0)


def test_turns_that_continue_each_other_are_one_sample() -> None:
    group = of(step([1, 2], [3, 4]), step([1, 2, 3, 4, 5], [6]))
    [sample] = training_samples(group, [np.array([0.5, -1.0])])
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]
    assert sample.advantages.tolist() == [0.5, 0.5, -1.0]
    assert np.allclose(sample.logprobs, [-0.03, -0.04, -0.06])
    assert sample.turn_spans == ((2, 4), (5, 6))
    assert (sample.group_id, sample.rollout_id) == (3, "r")


def test_a_broken_prefix_is_a_new_sample_whatever_the_steps_claim() -> None:
    group = of(step([1, 2], [3, 4]), step([1, 2, 3, 9], [6]))
    samples = training_samples(group, [np.array([0.5, -1.0])])
    assert [sample.token_ids.tolist() for sample in samples] == [[1, 2, 3, 4], [1, 2, 3, 9, 6]]
    assert [sample.advantages.tolist() for sample in samples] == [[0.5, 0.5], [-1.0]]


def test_a_declared_break_is_kept_even_where_the_tokens_happen_to_agree() -> None:
    assert segments([step([1], [2]), step([1, 2, 3], [4], segment=1)]) == [[0], [1]]


def test_tokens_the_policy_did_not_sample_are_context() -> None:
    group = of(step([1], [2], sampled=False), step([1, 2, 3], [4]))
    [sample] = training_samples(group, [np.array([9.0, 1.0])])
    assert sample.loss_mask.tolist() == [False, False, False, True]
    assert sample.advantages.tolist() == [1.0]
    assert training_samples(of(step([1], [2], sampled=False)), [np.array([1.0])]) == []


def test_values_of_samples_are_split_by_step() -> None:
    steps = [step([1], [2, 3]), step([1, 2, 3], [4], sampled=False), step([1, 2, 3, 4], [5]), step([9], [6], segment=1)]
    trajectory = Trajectory(steps=steps)
    known, unknown = np.array([0.1, 0.2, 0.3]), None
    parts = per_step(trajectory, trained_segments(trajectory), [known, unknown])
    assert [None if part is None else part.tolist() for part in parts] == [[0.1, 0.2], None, [0.3], None]


def test_token_rewards_are_added_to_those_that_a_step_has() -> None:
    once = with_token_rewards(of(step([1], [2, 3]), step([1, 2, 3, 4], [5])), [np.array([0.5, 1.0, 2.0])])
    assert [np.asarray(turn.token_rewards).tolist() for turn in once.trajectories[0].steps] == [[0.5, 1.0], [2.0]]
    twice = with_token_rewards(once, [np.array([0.25, 0.0, -2.0])])
    assert [np.asarray(turn.token_rewards).tolist() for turn in twice.trajectories[0].steps] == [[0.75, 1.0], [0.0]]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=1, max_size=4), st.lists(st.integers(0, 9), max_size=3), st.booleans()
        ),
        min_size=1,
        max_size=6,
    )
)
def test_every_sampled_token_is_in_exactly_one_sample(turns: list[tuple[list[int], list[int], bool]]) -> None:
    steps, so_far, segment = [], [0], 0
    for position, (completion, observation, breaks) in enumerate(turns):
        if position and breaks:
            so_far, segment = [0, *observation], segment + 1
        steps.append(step(list(so_far), completion, segment=segment))
        so_far = [*so_far, *completion, *observation]
    samples = training_samples(of(*steps), [np.arange(len(steps), dtype=np.float64)])
    sampled = [token for sample in samples for token in sample.token_ids[sample.loss_mask].tolist()]
    assert sampled == [token for taken in steps for token in taken.completion_ids.tolist()]
    credited = [value for sample in samples for value in sample.advantages.tolist()]
    assert credited == [float(position) for position, taken in enumerate(steps) for _ in taken.completion_ids]
    assert len(samples) == segment + 1


def test_groups_are_by_role_and_only_of_what_is_trained() -> None:
    def trajectory(role: str, *, trainable: bool = True) -> Trajectory:
        return Trajectory(role=role, steps=[step([1], [2])], reward=1.0, trainable=trainable)

    episodes = [
        Episode(
            task_id="t",
            rollout_id=f"r{index}",
            rollout_index=index,
            trajectories=[
                trajectory("solver"),
                trajectory("solver"),
                trajectory("judge"),
                trajectory("tool", trainable=False),
            ],
        )
        for index in range(2)
    ]
    groups = group_trajectories(5, "t", episodes)
    assert [(group.role, len(group.trajectories), group.rollout_ids) for group in groups] == [
        ("solver", 4, ["r0", "r0", "r1", "r1"]),
        ("judge", 2, ["r0", "r1"]),
    ]


def test_reasons_for_filtering() -> None:
    def rewarded(*rewards: float) -> TrajectoryGroup:
        trajectories = [Trajectory(steps=[step([1], [2])], reward=reward) for reward in rewards]
        ids = [str(index) for index in range(len(rewards))]
        return TrajectoryGroup(group_id=0, task_id="t", trajectories=trajectories, rollout_ids=ids, weight_version=0)

    def reason(group: TrajectoryGroup, *, drop_uniform: bool = False) -> FilterReason | None:
        return filter_reason(group, min_group_size=2, drop_uniform=drop_uniform)

    assert reason(rewarded(1.0)) is FilterReason.TOO_FEW
    assert reason(rewarded(1.0, 1.0)) is None
    assert reason(rewarded(1.0, 1.0), drop_uniform=True) is FilterReason.UNIFORM_REWARD
    assert reason(rewarded(1.0, 0.5), drop_uniform=True) is None
    assert reason(of(step([1], [2], sampled=False)), drop_uniform=True) is FilterReason.TOO_FEW


@pytest.mark.parametrize("credit", [[float("nan"), 0.0], [float("inf"), 0.0], [1e39, 0.0], [1.0], [1.0, 2.0, 3.0]])
def test_advantages_that_make_no_sense_never_reach_a_backend(credit: list[float]) -> None:
    with pytest.raises(ValueError, match="task 't': the estimator returned advantages"):
        training_samples(of(step([1], [2]), step([1, 2, 3], [4])), [np.array(credit)])


def test_advantages_per_token_of_another_trajectory_are_refused() -> None:
    two = Trajectory(steps=[step([1], [2]), step([1, 2, 3], [4])], reward=1.0)
    one = Trajectory(steps=[step([1], [2])], reward=1.0)
    group = TrajectoryGroup(group_id=3, task_id="t", trajectories=[two, one], rollout_ids=["r", "s"], weight_version=0)
    turn = np.array([1.0])
    assert len(training_samples(group, [[turn, turn], [turn]])) == 2
    with pytest.raises(ValueError, match=r"the estimator returned advantages .* for 2 steps"):
        training_samples(group, [[turn], [turn, turn]])


def test_a_completion_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="there was no prompt"):
        training_samples(of(step([], [2])), [np.array([1.0])])


def test_a_sample_of_32_thousand_tokens_takes_less_than_three_tenths_of_a_megabyte() -> None:
    turns, tokens = 16, 2048
    steps, prompt = [], [1]
    for _ in range(turns):
        steps.append(step(prompt, list(range(5, 5 + tokens - 1))))
        prompt = [*prompt, *range(5, 5 + tokens - 1), 2]
    [sample] = training_samples(of(*steps), [np.full(turns, 0.5)])
    assert sample.logprobs is not None
    assert len(sample.token_ids) > 32_000
    assert sample.advantages.tolist() == [0.5] * sample.sampled_tokens
    owned = sum(array.nbytes for array in (sample.token_ids, sample.logprobs)) + sample.advantages.strides[0]
    assert owned < 300_000
    assert sample.advantages.strides == (0,), "one number, stored once"
