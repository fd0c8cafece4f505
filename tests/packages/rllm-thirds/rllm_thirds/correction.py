"""A mask for tokens whose ratio has moved too far."""

from typing import ClassVar

import numpy as np
from pydantic import Field

from rllm_core.algorithms.corrections import Correction
from rllm_core.config import Section


class YoungMaskOptions(Section):
    """Parameters of ``young_mask``."""

    limit: float = Field(default=0.5, gt=0, description="Tokens whose log ratio is farther from 0 are masked.")


class YoungMask(Correction):
    """0 where ``abs(log rho) > limit``, else 1."""

    is_mask: ClassVar[bool] = True
    options_model = YoungMaskOptions
    options: YoungMaskOptions

    def __call__(self, log_ratios, starts):
        return (np.abs(log_ratios) <= self.options.limit).astype(np.float64)
