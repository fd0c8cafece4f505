"""Conversion of samples to verl's tensors; for one rank, this needs neither verl nor a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rllm_verl.batch import PADDING_ID, Rows, lay_out

from rllm_core.errors import RunError
from rllm_core.types import TrainingSample


def sample(token_ids: list[int], *spans: tuple[int, int], **arrays: Any) -> TrainingSample:
    count = sum(stop - start for start, stop in spans)
    defaults: dict[str, Any] = {"logprobs": -np.arange(1.0, count + 1), "advantages": np.arange(1.0, count + 1)}
    return TrainingSample(
        group_id=0,
        rollout_id="any",
        token_ids=np.array(token_ids),
        turn_spans=spans,
        weight_versions=(0,) * len(spans),
        **(defaults | arrays),
    )


# Two turns with an observation between them. The padding id occurs as a real token in each of the four parts.
TWO_TURNS = sample([5, PADDING_ID, 7, 9, PADDING_ID, 3, PADDING_ID, 8, PADDING_ID], (3, 5), (7, 9))
SHORT = sample([4, 6], (1, 2))


@pytest.fixture(scope="module")
def rows() -> Rows:
    """The two samples, the second one twice, and a filler row."""
    return lay_out([TWO_TURNS, SHORT, SHORT], ranks=1, mini_batches=2, max_tokens=9)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("prompts", [[5, 0, 7], [0, 0, 4], [0, 0, 0]]),
        ("responses", [[9, 0, 3, 0, 8, 0], [6, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]),
        ("input_ids", [[5, 0, 7, 9, 0, 3, 0, 8, 0], [0, 0, 4, 6, 0, 0, 0, 0, 0], [0] * 9]),
        ("attention_mask", [[1] * 9, [0, 0, 1, 1, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0, 0]]),
        ("position_ids", [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1, 1]]),
        ("response_mask", [[1, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0], [0] * 6]),
        ("advantages", [[1, 2, 0, 0, 3, 4], [1, 0, 0, 0, 0, 0], [0] * 6]),
        ("rollout_log_probs", [[-1, -2, 0, 0, -3, -4], [-1, 0, 0, 0, 0, 0], [0] * 6]),
        ("old_log_probs", [[-1, -2, 0, 0, -3, -4], [-1, 0, 0, 0, 0, 0], [0] * 6]),
    ],
)
def test_tensors(rows: Rows, name: str, expected: list[list[int]]) -> None:
    np.testing.assert_array_equal(rows.tensors[name][[0, 1, 3]], expected)


def test_a_row_that_fills_up_has_a_prompt_and_a_response_and_counts_nothing(rows: Rows) -> None:
    assert rows.tokens == [9, 2, 2, 2]
    assert rows.tensors["response_mask"][3].sum() == 0


def test_values_come_back_by_sample_without_what_was_not_sampled(rows: Rows) -> None:
    values = torch.arange(24.0).reshape(4, 6)
    two_turns, short, _ = rows.sampled(values)
    np.testing.assert_array_equal(two_turns, [0, 1, 4, 5])
    np.testing.assert_array_equal(short, [6])


@pytest.mark.parametrize(
    ("samples", "mini_batches", "expected"), [(5, 4, [2, 1, 1, 1]), (2, 4, [1, 1]), (6, 3, [2] * 3)]
)
def test_no_mini_batch_is_without_samples(samples: int, mini_batches: int, expected: list[int]) -> None:
    """verl divides by a mini-batch's tokens."""
    rows = lay_out([SHORT] * samples, ranks=1, mini_batches=mini_batches, max_tokens=9)
    assert rows.mini_batches == len(expected)
    parts = np.split(rows.tensors["response_mask"], rows.mini_batches)
    assert [part.sum() for part in parts] == expected


def test_ratios_begin_at_the_proximal_policy_where_there_is_one() -> None:
    proximal = sample([4, 6], (1, 2), proximal_logprobs=np.array([-0.5]))
    found = lay_out([proximal, SHORT], ranks=1, mini_batches=1, max_tokens=9).tensors
    np.testing.assert_array_equal(found["old_log_probs"], [[-0.5], [-1]])
    np.testing.assert_array_equal(found["rollout_log_probs"], [[-1], [-1]])


def test_values_that_not_every_sample_has_are_left_out() -> None:
    scored = sample([4, 6], (1, 2), reference_logprobs=np.array([-2.0]))
    unknown = sample([4, 6], (1, 2), logprobs=None)
    assert "ref_log_prob" in lay_out([scored], ranks=1, mini_batches=1, max_tokens=9).tensors
    found = lay_out([scored, unknown], ranks=1, mini_batches=1, max_tokens=9).tensors
    assert not {"ref_log_prob", "rollout_log_probs", "old_log_probs"} & found.keys()
    np.testing.assert_array_equal(found["advantages"], [[1], [1]])


def test_what_follows_the_last_sampled_token_is_left_out() -> None:
    found = lay_out([sample([4, 6, 9, 9], (1, 2)), SHORT], ranks=1, mini_batches=1, max_tokens=2)
    np.testing.assert_array_equal(found.tensors["input_ids"], [[4, 6], [4, 6]])
    assert found.tokens == [2, 2]


def test_a_sample_that_no_device_can_hold_is_named() -> None:
    with pytest.raises(RunError, match=r"has 9 tokens, and verl.max_tokens_per_device = 8"):
        lay_out([SHORT, TWO_TURNS], ranks=1, mini_batches=1, max_tokens=8)
