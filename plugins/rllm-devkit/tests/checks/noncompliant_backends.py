"""Backends that break one rule each, with the check that must fail."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from bigrams import BigramBackend, BigramEngine, initial_table

from rllm_core.backend import Capabilities, OptimizerStep, Policy, PolicyUpdate, TokenMeasures, UpdateResult
from rllm_core.config import ConfigError, RunConfig
from rllm_core.engine import RolloutEngine
from rllm_core.parser import BaseParser
from rllm_core.types import Floats, TrainingSample
from rllm_devkit.scripted import ByteParser

Samples = Sequence[TrainingSample]

# --------------------------------------------------------------------------------------------------------------------
# Before training


class StartingAThread(BigramBackend):
    started: ClassVar[list[threading.Thread]] = []
    is_over = threading.Event()

    def __init__(self, config: RunConfig, plugins: Any = None) -> None:
        super().__init__(config, plugins)
        self.started.append(threading.Thread(target=self.is_over.wait))
        self.started[-1].start()


class StartingAProcess(BigramBackend):
    started: ClassVar[list[subprocess.Popen[bytes]]] = []

    def validate_config(self) -> list[str]:
        self.started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return []


class Nameless(BigramBackend):
    name = ""


class CheckingNothing(BigramBackend):
    def validate_config(self) -> Any:
        return None


class NeedingAllocation(BigramBackend):
    """Fails to shut down after a failed allocation."""

    async def shutdown(self) -> None:
        assert self.engine is not None
        self.engine.table = initial_table()


class DeclaringADictionary(BigramBackend):
    @classmethod
    def capabilities(cls, config: RunConfig) -> Any:
        return {"losses": {"reinforce"}}


class Undecided(BigramBackend):
    asked = 0

    @classmethod
    def capabilities(cls, config: RunConfig) -> Capabilities:
        cls.asked += 1
        return Capabilities(lora=bool(cls.asked % 2))


class RewritingItsConfig(BigramBackend):
    @classmethod
    def capabilities(cls, config: RunConfig) -> Capabilities:
        config.plugins[cls.name] = {}
        return super().capabilities(config)


class InventingAggregations(BigramBackend):
    declared: ClassVar[dict[str, Any]] = {"aggregations": frozenset({"token_mean", "median"})}


class TrainingNothing(BigramBackend):
    declared: ClassVar[dict[str, Any]] = {"full": False}


class WithoutReference(BigramBackend):
    declared: ClassVar[dict[str, Any]] = {"kl_loss": True, "policies": frozenset({"current"})}


class RefusingWhatItDeclares(BigramBackend):
    def validate_config(self) -> list[str]:
        if self.config.algorithm.aggregation == "sequence_mean_token_sum":
            raise ConfigError("not that one")
        return []


class MessagesOnlyEngine(BigramEngine):
    supports_token_in_token_out = False


class WithoutTokens(BigramBackend):
    engine_class = MessagesOnlyEngine


class NotAllocating(BigramBackend):
    async def init_rollout_engine(self, parser: BaseParser) -> RolloutEngine:
        raise RuntimeError("no device")


class MakingNoEngine(BigramBackend):
    async def init_rollout_engine(self, parser: BaseParser) -> Any:
        return "engine"


class Unrepeatable(BigramEngine):
    asked = 0

    async def get_token_output_from_token_input(self, token_input: Any, **asked: Any) -> Any:
        self.asked += 1
        return await super().get_token_output_from_token_input(token_input, **{**asked, "seed": self.asked})


class DeclaringDeterminism(BigramBackend):
    engine_class = Unrepeatable


# --------------------------------------------------------------------------------------------------------------------
# Weights and versions


class ForgettingTheVersion(BigramBackend):
    async def on_policy_updated(self, update: PolicyUpdate) -> None:
        await super().on_policy_updated(PolicyUpdate(0, update.optimizer_step, update.reason))


class CountingByItself(BigramBackend):
    """Counts weight versions itself, from 0 in every new backend."""

    version = -1

    async def on_policy_updated(self, update: PolicyUpdate) -> None:
        self.version += 1
        await super().on_policy_updated(PolicyUpdate(self.version, update.optimizer_step, update.reason))


class PublishingTooEarly(BigramBackend):
    async def update_policy(self, step: OptimizerStep) -> UpdateResult:
        result = await super().update_policy(step)
        await self.on_policy_updated(PolicyUpdate(step.step, step.step, "step"))
        return result


class KeepingOldWeights(BigramBackend):
    """Updates the engine's weight version, but not its weights."""

    async def on_policy_updated(self, update: PolicyUpdate) -> None:
        assert self.engine is not None
        self.engine.weight_version = update.version


class HangingSync(BigramBackend):
    async def on_policy_updated(self, update: PolicyUpdate) -> None:
        if update.version:
            await asyncio.Event().wait()
        await super().on_policy_updated(update)


# --------------------------------------------------------------------------------------------------------------------
# Log-probabilities


class OffByOne(BigramBackend):
    async def compute_logprobs(self, samples: Samples, policy: Policy = "current") -> list[Floats]:
        return [np.roll(one, 1) for one in await super().compute_logprobs(samples, policy)]


class OfAllTokens(BigramBackend):
    async def compute_logprobs(self, samples: Samples, policy: Policy = "current") -> list[Floats]:
        return [np.zeros(len(sample.token_ids), np.float32) for sample in samples]


class NotANumber(BigramBackend):
    async def compute_logprobs(self, samples: Samples, policy: Policy = "current") -> list[Floats]:
        return [one * np.float32(np.nan) for one in await super().compute_logprobs(samples, policy)]


class Untempered(BigramBackend):
    async def compute_logprobs(self, samples: Samples, policy: Policy = "current") -> list[Floats]:
        config, rollout = self.config, self.config.rollout.model_copy(update={"temperature": 1.0})
        self.config = config.model_copy(update={"rollout": rollout})
        found = await super().compute_logprobs(samples, policy)
        self.config = config
        return found


class KnowingMoreThanItSays(BigramBackend):
    declared: ClassVar[dict[str, Any]] = {"policies": frozenset({"current"})}

    async def compute_logprobs(self, samples: Samples, policy: Policy = "current") -> list[Floats]:
        return await super().compute_logprobs(samples)


class DeclaringAReference(BigramBackend):
    async def compute_logprobs(self, samples: Samples, policy: Policy = "current") -> list[Floats]:
        if policy == "reference":
            raise NotImplementedError("no reference")
        return await super().compute_logprobs(samples, policy)


class MovingReference(BigramBackend):
    async def compute_logprobs(self, samples: Samples, policy: Policy = "current") -> list[Floats]:
        return await super().compute_logprobs(samples)


# --------------------------------------------------------------------------------------------------------------------
# Training


class WritingIntoSamples(BigramBackend):
    def transform_to_backend_batch(self, samples: Samples) -> Samples:
        for sample in samples:
            sample.role = "trained"
        return samples


class TrainingWhatItLaysOut(BigramBackend):
    def transform_to_backend_batch(self, samples: Samples) -> Samples:
        self.gradient[:, ByteParser.END] += len(samples)
        return samples


class WhiteningAgain(BigramBackend):
    """Shifts every advantage, including 0."""

    async def process_backend_batch(self, batch: Samples) -> None:
        await super().process_backend_batch(
            [sample.model_copy(update={"advantages": sample.advantages + np.float32(0.1)}) for sample in batch]
        )


class StandingStill(BigramBackend):
    async def process_backend_batch(self, batch: Samples) -> None:
        pass


class ReportingNothing(BigramBackend):
    async def update_policy(self, step: OptimizerStep) -> Any:
        return (await super().update_policy(step)).metrics


class ReportingLater(BigramBackend):
    """Reports log-probabilities of other weights than those before the step."""

    async def process_backend_batch(self, batch: Samples) -> None:
        await super().process_backend_batch(batch)
        self.processed = [*getattr(self, "processed", ()), *batch]

    async def update_policy(self, step: OptimizerStep) -> UpdateResult:
        result = await super().update_policy(step)
        return UpdateResult(result.metrics, {s.sample_id: self.measures(s) for s in self.processed})

    def measures(self, sample: TrainingSample) -> TokenMeasures:
        return TokenMeasures(logprobs=sample.logprobs - np.float32(0.5))


class ReportingTooFew(ReportingLater):
    def measures(self, sample: TrainingSample) -> TokenMeasures:
        return TokenMeasures(entropies=np.zeros(sample.sampled_tokens + 1, np.float32))


class ReportingNaN(BigramBackend):
    async def update_policy(self, step: OptimizerStep) -> UpdateResult:
        return UpdateResult({**(await super().update_policy(step)).metrics, "entropy": float("nan")})


class Contrary(BigramBackend):
    async def process_backend_batch(self, batch: Samples) -> None:
        await super().process_backend_batch(
            [sample.model_copy(update={"advantages": -sample.advantages}) for sample in batch]
        )


class IgnoringSigns(BigramBackend):
    async def process_backend_batch(self, batch: Samples) -> None:
        await super().process_backend_batch(
            [sample.model_copy(update={"advantages": np.abs(sample.advantages)}) for sample in batch]
        )


class KeepingTheLastPass(BigramBackend):
    async def process_backend_batch(self, batch: Samples) -> None:
        self.gradient = np.zeros_like(self.gradient)
        await super().process_backend_batch(batch)


class AveragingPasses(BigramBackend):
    """Weighs every pass equally, whatever its length."""

    async def process_backend_batch(self, batch: Samples) -> None:
        before, self.gradient = self.gradient, np.zeros_like(self.gradient)
        await super().process_backend_batch(batch)
        self.gradient = before + self.gradient / len(batch)


class MisreadingFractions(BigramBackend):
    declared: ClassVar[dict[str, Any]] = {"interpolated_proximal": True}

    async def process_backend_batch(self, batch: Samples) -> None:
        await super().process_backend_batch([sample for sample in batch if sample.proximal_fractions is None])


# --------------------------------------------------------------------------------------------------------------------
# Checkpoints


class ForgettingMoments(BigramBackend):
    async def load_checkpoint(self, directory: Path) -> None:
        await super().load_checkpoint(directory)
        self.moments = [np.zeros_like(self.table) for _ in range(2)]


class ForgettingWeights(BigramBackend):
    async def load_checkpoint(self, directory: Path) -> None:
        table = self.table
        await super().load_checkpoint(directory)
        self.table = table


class RememberingInMemory(BigramBackend):
    """Keeps its checkpoints in memory, not on disk."""

    kept: Any = None

    async def save_checkpoint(self, directory: Path) -> None:
        self.kept = {**(self.kept or {}), directory: (self.table, [moment.copy() for moment in self.moments])}

    async def load_checkpoint(self, directory: Path) -> None:
        if self.kept is not None:
            self.table, moments = self.kept[directory]
            self.moments = [moment.copy() for moment in moments]
        elif directory.name == "nothing":
            raise FileNotFoundError(directory)


class WithStateOfItsOwn(BigramBackend):
    def state_dict(self) -> dict[str, Any]:
        return {"step": np.int64(self.step)}


class WithTuples(BigramBackend):
    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "shape": self.table.shape}


class LoadingNothing(BigramBackend):
    async def load_checkpoint(self, directory: Path) -> None:
        if any(directory.iterdir()):
            await super().load_checkpoint(directory)


class ShutDownForGood(BigramBackend):
    is_over = False

    async def shutdown(self) -> None:
        if self.is_over:
            raise RuntimeError("it is over already")
        self.is_over = True


NONCOMPLIANT: list[tuple[type[BigramBackend], str, str]] = [
    (StartingAThread, "construction", "there are new threads"),
    (StartingAProcess, "construction", "there are new child processes"),
    (Nameless, "construction", "the class has no name"),
    (CheckingNothing, "construction", "must return a list of strings"),
    (NeedingAllocation, "construction", "raised AssertionError"),
    (DeclaringADictionary, "capabilities", "must return Capabilities"),
    (Undecided, "capabilities", "a second call of capabilities()"),
    (RewritingItsConfig, "capabilities", "modifies the run file"),
    (InventingAggregations, "capabilities", "unknown aggregations: median"),
    (TrainingNothing, "capabilities", "must declare lora, full, or both"),
    (WithoutReference, "capabilities", "needs 'reference' in policies"),
    (RefusingWhatItDeclares, "capabilities", "declares aggregation 'sequence_mean_token_sum', but rejects it"),
    (WithoutTokens, "start", "supports_token_in_token_out is False"),
    (NotAllocating, "start", "raised RuntimeError: no device"),
    (MakingNoEngine, "start", "must return a RolloutEngine"),
    (DeclaringDeterminism, "engine: seeds", "the same seed gives different tokens"),
    (ForgettingTheVersion, "batches", "after on_policy_updated of version 1 (step), the engine's weight_version is 0"),
    (CountingByItself, "checkpoint", "(resume), the engine's weight_version is 0"),
    (PublishingTooEarly, "batches", "update_policy changed the engine's weight_version to 1"),
    (KeepingOldWeights, "updates", "with equal weight versions, log-probabilities of the current policy"),
    (HangingSync, "batches", "on_policy_updated did not end within 1 s"),
    (OffByOne, "log-probabilities", "with equal weight versions, log-probabilities of the current policy"),
    (OfAllTokens, "log-probabilities", "returned arrays of shapes"),
    (NotANumber, "log-probabilities", "non-finite numbers"),
    (Untempered, "log-probabilities", "with equal weight versions"),
    (KnowingMoreThanItSays, "log-probabilities", "of the proximal policy, but does not declare"),
    (DeclaringAReference, "log-probabilities", "raised NotImplementedError: no reference"),
    (MovingReference, "updates", "changed the log-probabilities of the reference policy"),
    (WritingIntoSamples, "batches", "modifies the samples"),
    (TrainingWhatItLaysOut, "batches", "transformed but not processed"),
    (WhiteningAgain, "batches", "advantages of 0"),
    (StandingStill, "updates", "nothing is trained"),
    (ReportingNothing, "batches", "must return an UpdateResult"),
    (ReportingLater, "batches", "are not those under the weights before the step"),
    (ReportingTooFew, "batches", "update_policy returned entropies of shape"),
    (ReportingNaN, "batches", "not finite numbers: {'entropy': nan}"),
    (Contrary, "advantages", "an advantage of +1 changed the log-probability of its completion by -"),
    (IgnoringSigns, "advantages", "an advantage of -1 changed the log-probability of its completion by +"),
    (KeepingTheLastPass, "accumulation", "the same samples in two passes give another update"),
    (AveragingPasses, "accumulation", "the same samples in two passes give another update"),
    (MisreadingFractions, "proximal", "samples with proximal_fractions give another update"),
    (ForgettingMoments, "checkpoint", "after load_checkpoint, the next update differs"),
    (ForgettingWeights, "checkpoint", "from the saved ones"),
    (RememberingInMemory, "checkpoint", "after load_checkpoint in another backend"),
    (WithStateOfItsOwn, "saving", "state_dict() must return JSON data"),
    (WithTuples, "saving", "changes when written as JSON"),
    (LoadingNothing, "shutdown", "load_checkpoint must raise an error"),
    (ShutDownForGood, "shutdown", "raised RuntimeError: it is over already"),
]
