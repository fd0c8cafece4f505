"""Backends whose `load_weights` breaks one rule each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from bigrams import BigramBackend


class LoadingNoWeights(BigramBackend):
    async def load_weights(self, directory: Path) -> None:
        pass


class LoadingMoments(BigramBackend):
    async def load_weights(self, directory: Path) -> None:
        await super().load_weights(directory)
        with np.load(directory / "policy.npz", allow_pickle=False) as saved:
            self.moments = [saved["first"], saved["second"]]


class KeepingTheReference(BigramBackend):
    async def load_weights(self, directory: Path) -> None:
        reference = self.reference
        await super().load_weights(directory)
        self.reference = reference


class CountingStepsOfTheOtherRun(BigramBackend):
    async def load_weights(self, directory: Path) -> None:
        await super().load_weights(directory)
        self.step += 7


NONCOMPLIANT: list[tuple[type[BigramBackend], str, str]] = [
    (LoadingNoWeights, "initial weights", "log-probabilities differ"),
    (LoadingMoments, "initial weights", "the optimizer is not new"),
    (KeepingTheReference, "initial weights", "the reference policy has other weights"),
    (CountingStepsOfTheOtherRun, "initial weights", "load_weights changes state_dict()"),
]
