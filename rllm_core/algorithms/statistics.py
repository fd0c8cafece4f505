"""Means and deviations that are exactly 0 for equal numbers, regardless of rounding."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

# Rounding changes float64 sums by a few units in the last place; intended differences of rewards are far larger.
ROUNDING = 1e-9
WHITENING_EPSILON = 1e-8


def is_uniform(values: npt.NDArray[np.float64]) -> bool:
    """Whether ``(n,)`` numbers are equal up to the rounding of their sums."""
    return not values.size or bool(np.ptp(values) <= ROUNDING * np.abs(values).max())


def centred(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``(n,)`` numbers minus their mean; exactly 0 if all are equal."""
    if is_uniform(values):
        return np.zeros_like(values)
    shifted: npt.NDArray[np.float64] = values - values.min()
    return shifted - math.fsum(shifted.tolist()) / len(shifted)


def standardised(values: npt.NDArray[np.float64], *, epsilon: float, ddof: int = 0) -> npt.NDArray[np.float64]:
    """``(n,)`` numbers minus their mean, over ``std + epsilon`` (divisor ``n - ddof``); exactly 0 if equal."""
    deviations = centred(values)
    if not deviations.any():
        return deviations
    variance = math.fsum(np.square(deviations).tolist()) / (len(values) - ddof)
    return deviations / (math.sqrt(variance) + epsilon)


def leave_one_out(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``(n,)`` numbers, each minus the mean of the others: ``n / (n - 1)`` times `centred`; 0 if there is only one."""
    return centred(values) * (len(values) / max(len(values) - 1, 1))


def whitened(values: npt.NDArray[np.float64], tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``(values - mean) / sqrt(variance + 1e-8)`` over tokens, with the unbiased variance.

    Args:
        values: ``(n,)``.
        tokens: ``(n,)``: number of tokens that each value represents. Values without tokens are excluded from mean and
            variance.

    Returns:
        ``(n,)``; exactly 0 if all included values are equal, or there are fewer than two tokens.
    """
    counted = values[tokens > 0]
    total = float(tokens.sum())
    if total < 2 or is_uniform(counted):
        return np.zeros_like(values)
    shifted: npt.NDArray[np.float64] = values - counted.min()
    deviations = shifted - float((shifted * tokens).sum()) / total
    variance = float((np.square(deviations) * tokens).sum()) / (total - 1)
    return deviations / math.sqrt(variance + WHITENING_EPSILON)
