"""Tests of the difference between the log-probabilities of sampler and trainer."""

from __future__ import annotations

import numpy as np
import pytest

from rllm_core.algorithms.agreement import LogprobDifference


def test_the_largest_eighth_is_left_out_of_the_mean() -> None:
    ours = [np.zeros(10, np.float32), np.zeros(6, np.float32)]
    theirs = [np.full(10, -0.5, np.float32), np.array([0.1, 0.1, 0.1, 0.1, -9, 7], np.float32)]
    found = LogprobDifference.between(ours, theirs)
    assert found.typical == pytest.approx((10 * 0.5 + 4 * 0.1) / 14)
    assert (found.largest, found.tokens) == (9, 16)


def test_an_unknown_difference_is_never_small() -> None:
    gaps = np.zeros(16, np.float32)
    gaps[3] = np.nan
    assert np.isnan(LogprobDifference.of(gaps).typical)


def test_a_single_token_is_compared() -> None:
    assert LogprobDifference.of(np.array([0.25], np.float32)) == LogprobDifference(0.25, 0.25, 1)
