"""Tests of the public backend checks: compliant backends pass, and each check fails a noncompliant one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from bigrams import VOCABULARY, BigramBackend
from faithful import FaithfulScriptedBackend
from noncompliant_backends import NONCOMPLIANT, HangingSync, Samples, StartingAProcess, StartingAThread
from noncompliant_initial_weights import NONCOMPLIANT as WITH_OTHER_INITIAL_WEIGHTS
from noncompliant_reference_engines import NONCOMPLIANT as WITH_OTHER_REFERENCE_ENGINES

from rllm_core.backend import BackendProtocol, Policy, PolicyUpdate
from rllm_core.config import AlgorithmConfig, OptimizerConfig, RolloutConfig, RunConfig, TrainingConfig
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager
from rllm_core.types import Floats
from rllm_devkit.checks import CheckResult, check_backend
from rllm_devkit.checks.backends import BEFORE_TRAINING, TRAINING
from rllm_devkit.scripted import ByteParser

Make = Callable[[RunConfig], Any]
Results = Callable[..., list[CheckResult]]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    def check(make: Make, *, resumes_in_another: bool = False, **sections: Any) -> list[CheckResult]:
        known = {
            "rollout": RolloutConfig(max_response_tokens=8, temperature=0.8),
            "training": TrainingConfig(rollouts_per_group=4),
            "optimizer": OptimizerConfig(learning_rate=0.05),
        }
        config = RunConfig(workflow="any", backend="any", **{**known, **sections})
        return asyncio.run(
            check_backend(
                make,
                config,
                ByteParser(),
                tmp_path,
                vocabulary_size=VOCABULARY,
                resumes_in_another=resumes_in_another,
            )
        )

    return check


def named(results: Sequence[CheckResult], outcome: str) -> dict[str, str]:
    return {result.name: result.detail for result in results if result.outcome == outcome}


class Colocated(BigramBackend):
    """Shares its devices with its engine; only the side that has them can work."""

    declared: ClassVar[dict[str, Any]] = {"colocated": True}
    is_generating: bool | None = None

    async def enter_generation(self) -> None:
        self.is_generating = True

    async def enter_training(self) -> None:
        self.is_generating = False

    async def process_backend_batch(self, batch: Samples) -> None:
        assert self.is_generating is False
        await super().process_backend_batch(batch)

    async def compute_logprobs(self, samples: Samples, policy: Policy = "current") -> list[Floats]:
        assert self.is_generating is False
        return await super().compute_logprobs(samples, policy)

    async def on_policy_updated(self, update: PolicyUpdate) -> None:
        assert not self.is_generating
        await super().on_policy_updated(update)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm"])
def test_an_honest_backend_passes(results: Results, aggregation: Any) -> None:
    found = results(BigramBackend, resumes_in_another=True, algorithm=AlgorithmConfig(aggregation=aggregation))
    assert named(found, "failed") == {}
    assert named(found, "skipped").keys() == {"proximal"}
    assert named(found, "passed").keys() >= BEFORE_TRAINING.keys() | TRAINING.keys() - {"proximal"}


def test_a_backend_that_shares_its_devices_passes(results: Results) -> None:
    assert named(results(Colocated, resumes_in_another=True), "failed") == {}


def test_the_scripted_backend_passes(results: Results) -> None:
    plugins = PluginManager.from_environment(no_plugins=True)
    found = results(
        lambda config: FaithfulScriptedBackend(config, plugins), rollout=RolloutConfig(), training=TrainingConfig()
    )
    assert named(found, "failed") == {}
    assert named(found, "skipped").keys() == {"proximal"}


def test_it_is_allocated_once_and_shut_down(results: Results) -> None:
    allocated, ended = [], []

    class Watched(BigramBackend):
        async def init_rollout_engine(self, parser: BaseParser) -> Any:
            allocated.append(self)
            return await super().init_rollout_engine(parser)

        async def shutdown(self) -> None:
            ended.append(self)

    results(Watched)
    assert len(allocated) == 1
    assert allocated[0] in ended


def test_what_is_not_declared_is_not_asked(results: Results) -> None:
    class InOnePass(BigramBackend):
        declared: ClassVar[dict[str, Any]] = {"deferred_normalisation": False, "policies": frozenset({"current"})}

        async def process_backend_batch(self, batch: Samples) -> None:
            assert not self.gradient.any()
            await super().process_backend_batch(batch)

    found = results(InOnePass)
    assert named(found, "failed") == {}
    assert named(found, "skipped").keys() == {"proximal", "accumulation"}


def test_what_moves_weights_without_advantages_is_refused(results: Results) -> None:
    with pytest.raises(ValueError, match=r"optimizer.weight_decay = 0.1 must be 0"):
        results(BigramBackend, optimizer=OptimizerConfig(weight_decay=0.1))


def test_a_backend_that_does_not_start_skips_the_rest(results: Results) -> None:
    class Absent(BigramBackend):
        async def init_rollout_engine(self, parser: BaseParser) -> Any:
            raise RuntimeError("no device")

    found = results(Absent)
    assert named(found, "failed").keys() == {"start"}
    assert named(found, "passed").keys() == {"construction", "capabilities", "shutdown"}


def test_a_backend_without_initial_weights_is_not_asked_for_them(results: Results) -> None:
    class WithoutInitialWeights(BigramBackend):
        load_weights = BackendProtocol.load_weights

    found = results(WithoutInitialWeights)
    assert named(found, "failed") == {}
    assert named(found, "skipped").keys() == {"proximal", "initial weights"}


def test_a_backend_without_a_reference_engine_is_not_asked_for_it(results: Results) -> None:
    class WithoutReferenceEngine(BigramBackend):
        init_reference_engine = BackendProtocol.init_reference_engine

    found = results(WithoutReferenceEngine)
    assert named(found, "failed") == {}
    assert named(found, "skipped").keys() == {"proximal", "reference engine"}


def test_an_interrupted_check_shuts_the_backend_down(tmp_path: Path) -> None:
    ended = []

    async def interrupted() -> None:
        reached = asyncio.Event()

        class Slow(BigramBackend):
            async def update_policy(self, step: Any) -> Any:
                reached.set()
                await asyncio.Event().wait()

            async def shutdown(self) -> None:
                if self.engine is not None:
                    ended.append(self)

        config = RunConfig(workflow="any", rollout=RolloutConfig(max_response_tokens=8))
        task = asyncio.create_task(check_backend(Slow, config, ByteParser(), tmp_path))
        await reached.wait()
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    assert len(ended) == 1


@pytest.fixture
def leftovers() -> Iterator[None]:
    """Ends threads and processes left behind by backends of these tests."""
    yield
    StartingAThread.is_over.set()
    for thread in StartingAThread.started:
        thread.join()
    for process in StartingAProcess.started:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("leftovers")
@pytest.mark.parametrize(
    ("noncompliant", "check", "words"),
    [*NONCOMPLIANT, *WITH_OTHER_INITIAL_WEIGHTS, *WITH_OTHER_REFERENCE_ENGINES],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_backend_that_breaks_a_rule_is_caught(
    results: Results, noncompliant: type[BigramBackend], check: str, words: str
) -> None:
    limits = (
        {"training": TrainingConfig(rollouts_per_group=4, sync_timeout_seconds=1.0)}
        if noncompliant is HangingSync
        else {}
    )
    found = named(results(noncompliant, resumes_in_another=True, **limits), "failed")
    assert check in found, found
    assert words in found[check]


def test_every_check_has_caught_somebody() -> None:
    caught = {check for _, check, _ in [*NONCOMPLIANT, *WITH_OTHER_INITIAL_WEIGHTS, *WITH_OTHER_REFERENCE_ENGINES]}
    assert caught == {*BEFORE_TRAINING, *TRAINING, "engine: seeds"}
