"""Corrections that the core ships: weights first, then masks. `rllm_core.algorithms.corrections` defines ``rho``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rllm_core.algorithms.corrections import MAX_LOG_RATIO, Correction, LogRatios, Starts, Weights
from rllm_core.run_file import Section

Mask = npt.NDArray[np.bool_]


class CapOptions(Section):
    """``algorithm.correction_options`` of ``token_tis`` and ``sequence_tis``."""

    cap: float = Field(default=2.0, ge=1, description="Maximum weight.")


class TokenTIS(Correction):
    """``min(rho, cap)`` per token: truncated importance sampling.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
    """

    options_model = CapOptions
    options: CapOptions

    def __call__(self, log_ratios: LogRatios, starts: Starts) -> Weights:
        return np.minimum(np.exp(log_ratios), self.options.cap)


class SequenceTIS(Correction):
    """``min(product of rho over the sequence, cap)`` for each token of the sequence.

    Source: as `TokenTIS`, for sequences. Unbiased below the cap; the variance grows with the sequence length.
    """

    options_model = CapOptions
    options: CapOptions

    def __call__(self, log_ratios: LogRatios, starts: Starts) -> Weights:
        return _per_token(np.minimum(_products(log_ratios, starts), self.options.cap), log_ratios, starts)


class IcePopOptions(Section):
    """``algorithm.correction_options`` of ``icepop``."""

    low: float = Field(default=0.5, ge=0, le=1, description="Ratio below which a token is masked.")
    high: float = Field(default=5.0, ge=1, description="Ratio above which a token is masked.")


class IcePop(Correction):
    """``rho`` inside ``[low, high]``, else 0: masked importance sampling (MIS) of tokens.

    Source: "Every Step Evolves" (Ring-1T), arXiv 2510.18855.
    """

    options_model = IcePopOptions
    options: IcePopOptions

    def __call__(self, log_ratios: LogRatios, starts: Starts) -> Weights:
        ratios = np.exp(log_ratios)
        return np.where(_is_inside(ratios, self.options), ratios, 0.0)


class SequenceMISOptions(Section):
    """``algorithm.correction_options`` of ``sequence_mis``."""

    low: float = Field(default=0.0, ge=0, le=1, description="Ratio below which a sequence is masked.")
    high: float = Field(default=3.0, ge=1, description="Ratio above which a sequence is masked.")


class SequenceMIS(Correction):
    """Product of ``rho`` over the sequence if it is inside ``[low, high]``, else 0 for all tokens of the sequence.

    Source: as `SequenceTIS`, masked instead of capped. The bound is the same as in TRL's ``sequence_mask``.
    """

    options_model = SequenceMISOptions
    options: SequenceMISOptions

    def __call__(self, log_ratios: LogRatios, starts: Starts) -> Weights:
        products = _products(log_ratios, starts)
        return _per_token(np.where(_is_inside(products, self.options), products, 0.0), log_ratios, starts)


class Importance(Correction):
    """``rho`` per token, unbounded: with the loss ``ppo_clip``, decoupled PPO.

    Source: arXiv 2110.00641; with asynchronous language models, AReaL, arXiv 2505.24298, eq. 5.
    """

    def __call__(self, log_ratios: LogRatios, starts: Starts) -> Weights:
        return np.exp(log_ratios)


# --------------------------------------------------------------------------------------------------------------------
# Masks


class GeometricRejectionOptions(Section):
    """``algorithm.correction_options`` of ``geometric_rejection``."""

    low: float = Field(default=0.999, ge=0, le=1, description="Mean ratio below which a sequence is masked.")
    high: float = Field(default=1.001, ge=1, description="Mean ratio above which a sequence is masked.")


class GeometricRejection(Correction):
    """Keeps sequences whose geometric mean of ``rho`` is inside ``[low, high]``, independent of length.

    Source: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
    (2025); verl's ``rollout_rs = "geometric"``.
    """

    is_mask = True
    options_model = GeometricRejectionOptions
    options: GeometricRejectionOptions

    def __call__(self, log_ratios: LogRatios, starts: Starts) -> Weights:
        kept = _is_inside(np.exp(_means(log_ratios, starts)), self.options)
        return _per_token(kept.astype(np.float64), log_ratios, starts)


class K3RejectionOptions(Section):
    """``algorithm.correction_options`` of ``k3_rejection``."""

    limit: float = Field(default=0.01, gt=0, description="Estimated divergence above which a sequence is masked.")


class K3Rejection(Correction):
    """Keeps sequences whose mean of ``rho - log rho - 1``, an estimate of ``KL(mu || pi_old)``, is at most ``limit``.

    Ratios above and below 1 do not cancel out as they do in the geometric mean. Source: as `GeometricRejection`.
    """

    is_mask = True
    options_model = K3RejectionOptions
    options: K3RejectionOptions

    def __call__(self, log_ratios: LogRatios, starts: Starts) -> Weights:
        kept = _means(np.expm1(log_ratios) - log_ratios, starts) <= self.options.limit
        return _per_token(kept.astype(np.float64), log_ratios, starts)


def _is_inside(ratios: Weights, bounds: IcePopOptions | SequenceMISOptions | GeometricRejectionOptions) -> Mask:
    return (ratios >= bounds.low) & (ratios <= bounds.high)


def _products(log_ratios: LogRatios, starts: Starts) -> Weights:
    """``(sequences,)`` products of ``rho``, clamped in log space."""
    products: Weights = np.exp(np.clip(np.add.reduceat(log_ratios, starts), -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return products


def _means(values: Weights, starts: Starts) -> Weights:
    """``(sequences,)`` means."""
    means: Weights = np.add.reduceat(values, starts) / np.diff(starts, append=len(values))
    return means


def _per_token(values: Weights, log_ratios: LogRatios, starts: Starts) -> Weights:
    """``(tokens,)`` from ``(sequences,)``."""
    return np.repeat(values, np.diff(starts, append=len(log_ratios)))
