"""Off-policy corrections: weights for tokens that an older policy sampled.

Each token involves three policies: ``mu`` sampled it (the engine reported its log-probabilities), ``pi_old`` is the
proximal policy at the start of the step, and ``pi_theta`` is being trained. The loss's ratio is ``pi_theta / pi_old``;
a correction covers ``rho = pi_old / mu``. Its weights are constants >= 0 that multiply the advantages. Every policy
loss is linear in the scale of its advantages, so this equals multiplying the loss, on every backend. A weight of 0
removes a token from the loss's sum, but not from the counts that the sum is divided by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rllm_core.algorithms.options import Configured
from rllm_core.blame import blamed
from rllm_core.config import Section
from rllm_core.errors import RunError

MAX_LOG_RATIO = 20.0

Weights = npt.NDArray[np.float64]
LogRatios = npt.NDArray[np.float64]
Starts = npt.NDArray[np.int64]


class Correction(Configured, ABC):
    """Weights for tokens that an older policy sampled; selected by ``algorithm.corrections``.

    Attributes:
        is_mask: Whether its weights are only 0 and 1. Masks combine freely. A run may use at most one other
            correction, since two would count the same ratio twice.
    """

    is_mask: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, log_ratios: LogRatios, starts: Starts) -> Weights:
        """Weights of shape ``(tokens,)``.

        Args:
            log_ratios: ``(tokens,)`` ``log rho``, clamped to +-20, for all sampled tokens of some sequences.
            starts: ``(sequences,)`` start position of each sequence. Every sequence has at least one token.
        """


class Corrections:
    """All corrections of a run, combined into one factor.

    Args:
        corrections: Corrections in the order of the run file.
    """

    def __init__(self, corrections: Sequence[Correction]) -> None:
        self.corrections = list(corrections)

    def __bool__(self) -> bool:
        return bool(self.corrections)

    def weights(
        self, log_ratios: npt.NDArray[np.floating], starts: Starts, task_ids: Sequence[str] | None = None
    ) -> Weights:
        """``(tokens,)`` product of all weights; 1 without corrections.

        Args:
            log_ratios: ``(tokens,)`` proximal minus rollout log-probabilities.
            starts: ``(sequences,)`` start position of each sequence.
            task_ids: ``(sequences,)`` task ids for errors.

        Raises:
            RunError: If a correction fails, or its weights are not finite, negative, or not one per token.
        """
        clamped = np.clip(np.asarray(log_ratios, np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO)
        product = np.ones_like(clamped)
        for correction in self.corrections:
            try:
                weights = np.asarray(correction(clamped, starts), np.float64)
            except Exception as error:  # a correction may come from any plugin
                raise RunError(f"{correction.label} failed: {blamed(error)}") from error
            wrong = None if weights.shape != clamped.shape else np.flatnonzero(~np.isfinite(weights) | (weights < 0))
            if wrong is None or wrong.size:
                what = f"{correction.label} must return one finite weight >= 0 per token"
                if wrong is not None and task_ids is not None:
                    what = f"task {task_ids[np.searchsorted(starts, wrong[0], 'right') - 1]!r}: {what}"
                raise RunError(what)
            if correction.is_mask and not ((weights == 0) | (weights == 1)).all():
                raise RunError(f"{correction.label} declares is_mask, so it must return 0 or 1 per token")
            product *= weights
        return product


# --------------------------------------------------------------------------------------------------------------------
# Weights


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
        """See `Correction`."""
        return np.minimum(np.exp(log_ratios), self.options.cap)


class SequenceTIS(Correction):
    """``min(product of rho over the sequence, cap)`` for each token of the sequence.

    Source: as `TokenTIS`, for sequences. Unbiased below the cap; the variance grows with the sequence length.
    """

    options_model = CapOptions
    options: CapOptions

    def __call__(self, log_ratios: LogRatios, starts: Starts) -> Weights:
        """See `Correction`."""
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
        """See `Correction`."""
        return _inside(np.exp(log_ratios), self.options)


class SequenceMISOptions(Section):
    """``algorithm.correction_options`` of ``sequence_mis``."""

    low: float = Field(default=0.0, ge=0, le=1, description="Ratio below which a sequence is masked.")
    high: float = Field(default=3.0, ge=1, description="Ratio above which a sequence is masked.")


class SequenceMIS(Correction):
    """Product of ``rho`` over the sequence if it is inside ``[low, high]``, else 0 for all tokens of the sequence.

    Source: as `SequenceTIS`, masked instead of capped. The bound is the one of TRL's ``sequence_mask``.
    """

    options_model = SequenceMISOptions
    options: SequenceMISOptions

    def __call__(self, log_ratios: LogRatios, starts: Starts) -> Weights:
        """See `Correction`."""
        return _per_token(_inside(_products(log_ratios, starts), self.options), log_ratios, starts)


class Importance(Correction):
    """``rho`` per token, unbounded: with the loss ``ppo_clip``, decoupled PPO.

    Source: arXiv 2110.00641; with asynchronous language models, AReaL, arXiv 2505.24298, eq. 5.
    """

    def __call__(self, log_ratios: LogRatios, starts: Starts) -> Weights:
        """See `Correction`."""
        weights: Weights = np.exp(log_ratios)
        return weights


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
        """See `Correction`."""
        means = np.exp(_means(log_ratios, starts))
        kept = (means >= self.options.low) & (means <= self.options.high)
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
        """See `Correction`."""
        kept = _means(np.expm1(log_ratios) - log_ratios, starts) <= self.options.limit
        return _per_token(kept.astype(np.float64), log_ratios, starts)


def _inside(ratios: Weights, bounds: IcePopOptions | SequenceMISOptions) -> Weights:
    return np.where((ratios >= bounds.low) & (ratios <= bounds.high), ratios, 0.0)


def _lengths(values: Weights, starts: Starts) -> Starts:
    return np.diff(starts, append=len(values))


def _products(log_ratios: LogRatios, starts: Starts) -> Weights:
    """``(sequences,)`` products of ``rho``, clamped in log space."""
    sums = np.add.reduceat(log_ratios, starts)
    products: Weights = np.exp(np.clip(sums, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return products


def _means(values: Weights, starts: Starts) -> Weights:
    """``(sequences,)`` means."""
    means: Weights = np.add.reduceat(values, starts) / _lengths(values, starts)
    return means


def _per_token(values: Weights, log_ratios: LogRatios, starts: Starts) -> Weights:
    """``(tokens,)`` from ``(sequences,)``."""
    return np.repeat(values, _lengths(log_ratios, starts))
