"""Off-policy corrections: what a token sampled by an older policy is worth to the one that is trained.

Three policies: ``mu`` sampled the tokens (its log-probabilities came from the engine), ``pi_old`` is the proximal
policy at the start of the step, ``pi_theta`` is trained. The loss's ratio is ``pi_theta / pi_old``; a correction
answers for ``rho = pi_old / mu``. Its weights are constants, at least 0, that multiply the advantages; since every
policy loss is linear in the scale of its advantages, that equals multiplying the loss, on every backend. Weights of 0
mask tokens out of the sum of the loss, not out of the counts it is divided by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from rllm_core.algorithms.options import Configured
from rllm_core.errors import RunError
from rllm_core.loading import one_line

MAX_LOG_RATIO = 20.0


class Correction(Configured, ABC):
    """Weights for tokens that an older policy sampled; selected by ``algorithm.corrections``.

    Attributes:
        is_mask: Whether its weights are 0 and 1 only. Masks combine with anything; of the others a run has one at most,
            since two would count the same ratio twice.
    """

    is_mask: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, log_ratios: npt.NDArray[np.float64], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Weights of shape ``(tokens,)``.

        Args:
            log_ratios: ``(tokens,)`` of ``log rho``, clamped to +-20, for all sampled tokens of some sequences.
            starts: ``(sequences,)`` where each sequence begins; each has at least one token.
        """


class Corrections:
    """All corrections of a run, as one factor.

    Args:
        corrections: In the order of the run file.
    """

    def __init__(self, corrections: Sequence[Correction]) -> None:
        self.corrections = list(corrections)

    def __bool__(self) -> bool:
        return bool(self.corrections)

    def weights(self, log_ratios: npt.NDArray[np.floating], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """``(tokens,)`` the product of all weights; 1 without corrections.

        Args:
            log_ratios: ``(tokens,)`` of proximal over rollout log-probabilities.
            starts: ``(sequences,)`` where each sequence begins.

        Raises:
            RunError: If a correction fails, or its weights are not finite, negative, or not one per token.
        """
        clamped = np.clip(np.asarray(log_ratios, np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO)
        product = np.ones_like(clamped)
        for correction in self.corrections:
            try:
                weights = np.asarray(correction(clamped, starts), np.float64)
            except Exception as error:  # it may be anybody's
                raise RunError(f"{correction.label} failed: {one_line(error)}") from error
            if weights.shape != clamped.shape or not np.isfinite(weights).all() or (weights < 0).any():
                raise RunError(f"{correction.label} must return one finite weight >= 0 per token")
            product *= weights
        return product
