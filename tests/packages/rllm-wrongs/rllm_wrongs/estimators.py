"""Broken estimators."""

import numpy as np
from pydantic import BaseModel

from rllm_core.algorithms.advantages import AdvantageEstimator


class NoEstimator:
    pass


class Wrong(AdvantageEstimator):
    def __call__(self, groups):
        return [[self.credit(trajectory) for trajectory in group.trajectories] for group in groups]


class CannotBeMade(Wrong):
    def __init__(self, *args, **kwargs):
        raise KeyError("ABACUS_HOME")


class SaysNaN(Wrong):
    def credit(self, trajectory):
        return np.full(len(trajectory.steps), np.nan)


class WrongShape(Wrong):
    def credit(self, trajectory):
        return np.zeros((len(trajectory.steps), 2))


class SaysNothing(Wrong):
    def credit(self, trajectory):
        return None


class Fails(Wrong):
    def credit(self, trajectory):
        return 1 / 0


class WrongCount(AdvantageEstimator):
    def __call__(self, groups):
        return [[np.zeros(1)] for _ in groups]


class UndeclaredTokens(Wrong):
    def credit(self, trajectory):
        return [np.zeros(len(step.completion_ids)) for step in trajectory.steps]


class AnyKey(BaseModel):
    known: int = 0


class LaxOptions(Wrong):
    options_model = AnyKey

    def credit(self, trajectory):
        return np.zeros(len(trajectory.steps))


class Exits(Wrong):
    def credit(self, trajectory):
        raise SystemExit


class ExitsWhenMade(Wrong):
    def __init__(self, *args, **kwargs):
        raise SystemExit(0)
