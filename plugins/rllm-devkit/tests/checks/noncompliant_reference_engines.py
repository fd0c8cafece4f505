"""Backends whose `init_reference_engine` breaks one rule each."""

from __future__ import annotations

from pathlib import Path

from bigrams import BigramBackend, BigramEngine

from rllm_core.engine import RolloutEngine


class JudgingWithTheCurrentWeights(BigramBackend):
    async def init_reference_engine(self) -> RolloutEngine:
        assert self.engine is not None
        self.engine.weight_version = 0
        return self.engine


class CopyingWhatIsTrainedByThen(BigramBackend):
    async def init_reference_engine(self) -> RolloutEngine:
        self.reference_engine = BigramEngine(self.table.copy(), self.engine and self.engine.parser)
        return self.reference_engine


class ForgettingTheOtherRun(BigramBackend):
    async def load_weights(self, directory: Path) -> None:
        engine, self.reference_engine = self.reference_engine, None
        await super().load_weights(directory)
        self.reference_engine = engine


class NumberingTheVersion(BigramBackend):
    async def init_reference_engine(self) -> RolloutEngine:
        engine = await super().init_reference_engine()
        engine.weight_version = 3
        return engine


class WithoutTheParser(BigramBackend):
    async def init_reference_engine(self) -> RolloutEngine:
        return BigramEngine(self.reference.copy())


NONCOMPLIANT: list[tuple[type[BigramBackend], str, str]] = [
    (JudgingWithTheCurrentWeights, "reference engine", "the weights of the start, after an update"),
    (CopyingWhatIsTrainedByThen, "reference engine", "the weights of the start"),
    (ForgettingTheOtherRun, "reference engine", "the weights of another run, after load_weights"),
    (NumberingTheVersion, "reference engine", "is 3, not 0"),
    (WithoutTheParser, "reference engine", "another parser"),
]
