"""``placeholder``: weights of tokens that an older policy sampled."""

from __future__ import annotations

import numpy as np
from pydantic import Field
from rllm_core.algorithms.corrections import Correction, LogRatios, Starts, Weights
from rllm_core.config import Section


class PlaceholderOptions(Section):
    """``algorithm.correction_options.placeholder``."""

    width: float = Field(default=0.2, ge=0, description="Largest distance of the log ratio from 0 with weight 1.")


class PlaceholderCorrection(Correction):
    """``exp(width - abs(log rho))``, at most 1: tokens whose probability has moved count less.

    ``rho`` is the probability of a token under the policy before the step, divided by its probability under the policy
    that sampled it.
    """

    options_model = PlaceholderOptions
    options: PlaceholderOptions

    def __call__(self, log_ratios: LogRatios, starts: Starts) -> Weights:
        """Returns ``(tokens,)`` weights; the sequences start at the positions ``starts``."""
        return np.exp(np.minimum(self.options.width - np.abs(log_ratios), 0.0))
