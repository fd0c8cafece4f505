"""Tests of the correction: contract and formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
from rllm_devkit.contracts import CorrectionContract

from rllm_placeholder.correction import PlaceholderCorrection


class TestContract(CorrectionContract):
    """Runs each contract check as a test, with the default options."""

    name = "placeholder"


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize(
    ("distance", "weight"), [(0.0, 1.0), (0.2, 1.0), (0.3, math.exp(-0.1)), (20.0, math.exp(-19.8))]
)
def test_the_formula(distance: float, weight: float, direction: int) -> None:
    weights = PlaceholderCorrection()(np.array([direction * distance]), np.zeros(1, np.int64))
    assert weights.tolist() == pytest.approx([weight])


def test_the_width() -> None:
    wide, narrow = (PlaceholderCorrection({"width": width}) for width in (1.0, 0.0))
    log_ratios, starts = np.array([0.5, -0.5]), np.zeros(1, np.int64)
    assert wide(log_ratios, starts).tolist() == [1.0, 1.0]
    assert narrow(log_ratios, starts).tolist() == pytest.approx([math.exp(-0.5)] * 2)
