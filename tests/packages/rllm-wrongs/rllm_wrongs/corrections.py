"""Broken corrections."""

import numpy as np

from rllm_core.algorithms.corrections import Correction


class NoCorrection:
    pass


class Negative(Correction):
    def __call__(self, log_ratios, starts):
        return np.full(len(log_ratios), -1.0)


class Short(Correction):
    def __call__(self, log_ratios, starts):
        return np.ones(len(starts) + len(log_ratios))


class FailingCorrection(Correction):
    def __call__(self, log_ratios, starts):
        return starts["first"]
