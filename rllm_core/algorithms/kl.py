"""Estimates of the divergence from a reference model, on numpy arrays."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from rllm_core.algorithms.corrections import MAX_LOG_RATIO

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs: npt.NDArray[np.floating], reference_logprobs: npt.NDArray[np.floating], estimator: KLEstimator
) -> npt.NDArray[np.float64]:
    """``(tokens,)`` estimates of ``KL(policy || reference)``, from tokens of the policy.

    With ``x = log(reference / policy)``, clamped to +-20: k1 is ``-x`` (unbiased), k2 is ``x^2 / 2``, and k3 is
    ``e^x - x - 1`` (unbiased and never negative). Source: Schulman, "Approximating KL Divergence" (2020).

    Args:
        logprobs: ``(tokens,)`` log-probabilities under the policy.
        reference_logprobs: ``(tokens,)`` log-probabilities under the reference model.
        estimator: ``k1``, ``k2`` or ``k3``.
    """
    difference = np.asarray(reference_logprobs, np.float64) - logprobs
    x: npt.NDArray[np.float64] = np.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -x
    return np.square(x) / 2 if estimator == "k2" else np.expm1(x) - x
