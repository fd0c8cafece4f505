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

from rllm_core.algorithms.options import Configured
from rllm_core.errors import RunError
from rllm_core.moved import moved_names

__getattr__ = moved_names(__name__)

MAX_LOG_RATIO = 20.0
MAX_WEIGHT = float(np.finfo(np.float32).max)  # advantages are float32

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
            RunError: If a correction fails, or its weights are not finite in a float32, negative, or not one per token.
        """
        clamped = np.clip(np.asarray(log_ratios, np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO)
        product = np.ones_like(clamped)
        for correction in self.corrections:
            weights = correction.attempt(_weights, correction, clamped, starts)
            wrong = None if weights.shape != clamped.shape else np.flatnonzero(~(weights <= MAX_WEIGHT) | (weights < 0))
            if wrong is None or wrong.size:
                what = f"{correction.label} must return one finite weight >= 0 per token, as a float32"
                if wrong is not None and task_ids is not None:
                    what = f"task {task_ids[np.searchsorted(starts, wrong[0], 'right') - 1]!r}: {what}"
                raise RunError(what)
            if correction.is_mask and not ((weights == 0) | (weights == 1)).all():
                raise RunError(f"{correction.label} declares is_mask, so it must return 0 or 1 per token")
            product *= weights
        return product


def _weights(correction: Correction, log_ratios: LogRatios, starts: Starts) -> Weights:
    return np.asarray(correction(log_ratios, starts), np.float64)
