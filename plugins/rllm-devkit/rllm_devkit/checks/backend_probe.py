"""Drives a backend for `rllm_devkit.checks.check_backend`, in the order the trainer does."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from rllm_core.backend import (
    BackendProtocol,
    Capabilities,
    OptimizerStep,
    Policy,
    PolicyUpdate,
    TokenMeasures,
    UpdateResult,
)
from rllm_core.config import RunConfig
from rllm_core.engine import RolloutEngine, derive_seed
from rllm_core.errors import StallError
from rllm_core.limits.timeouts import within
from rllm_core.parser import BaseParser
from rllm_core.types import Floats, SamplingParams, TokenIds, TrainingSample
from rllm_devkit.checks.engine_probe import EngineProbe
from rllm_devkit.checks.results import NotApplicable, Violation

ResultT = TypeVar("ResultT")

OBSERVED_TOKENS = 4


@dataclass(frozen=True)
class Saved:
    """A checkpoint.

    Attributes:
        directory: Folder of the checkpoint.
        state: Result of `BackendProtocol.state_dict`, read back from JSON.
        step: Optimizer steps done.
        logprobs: Log-probabilities of the samples under the current policy.
    """

    directory: Path
    state: dict[str, Any]
    step: int
    logprobs: list[Floats]


@dataclass
class Outcome:
    """The result of an optimizer step.

    Attributes:
        before: Log-probabilities of the samples before the step.
        after: Log-probabilities of the samples after the step.
        metrics: Metrics the step reported.
    """

    before: list[Floats]
    after: list[Floats]
    metrics: dict[str, float]


@dataclass
class BackendProbe:
    """The backend under test, its state, and results the checks share.

    Attributes:
        samples: Completions sampled before any training, with log-probabilities.
        first: Checkpoint from before the first gradient.
        update: Result of the first gradient step.
    """

    make: Callable[[RunConfig], BackendProtocol[Any]]
    config: RunConfig
    parser: BaseParser
    directory: Path
    prompts: Sequence[TokenIds]
    logprob_tolerance: float
    resumes_in_another: bool
    vocabulary_size: int | None
    samples: list[TrainingSample] = field(default_factory=list)
    first: Saved | None = None
    update: Outcome | None = None
    _backend: BackendProtocol[Any] | None = None
    _engine: RolloutEngine | None = None
    _version: int = -1
    _step: int = 0
    _is_generating: bool = False
    _is_live: bool = False
    _saves: int = 0
    _known: list[Floats] | None = None

    @property
    def backend(self) -> BackendProtocol[Any]:
        """The current backend.

        Raises:
            NotApplicable: If no backend could be started.
        """
        if self._backend is None:
            raise NotApplicable("the backend did not start")
        return self._backend

    @property
    def engine(self) -> RolloutEngine:
        """The engine of the current backend.

        Raises:
            NotApplicable: If the engine is not ready to sample.
        """
        if self._engine is None or not self._is_live:
            raise NotApplicable("the backend did not start")
        return self._engine

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities the backend declares."""
        return type(self.backend).capabilities(self.config)

    # ----------------------------------------------------------------------------------------------------------------
    # Life cycle

    async def allocate(self) -> RolloutEngine:
        """Creates a backend and its engine."""
        backend = self.make(self.config)
        self._backend, self._is_live, self._is_generating = backend, False, False
        engine = await self._within("init_rollout_engine", backend.init_rollout_engine(self.parser))
        if not isinstance(engine, RolloutEngine):
            raise Violation(f"init_rollout_engine must return a RolloutEngine, got {engine!r:.80}")
        self._engine = engine
        return engine

    async def reference_engine(self) -> RolloutEngine:
        """Allocates the engine with the weights the run started from."""
        engine = await self._within("init_reference_engine", self.backend.init_reference_engine())
        if not isinstance(engine, RolloutEngine):
            raise Violation(f"init_reference_engine must return a RolloutEngine, got {engine!r:.80}")
        return engine

    async def publish(self, reason: Literal["start", "step", "resume"]) -> None:
        """Publishes the next weight version."""
        update = PolicyUpdate(self._version + 1, self._step, reason)
        assert self._engine is not None
        await self._within("on_policy_updated", self.backend.on_policy_updated(update))
        if self._engine.weight_version != update.version:
            raise Violation(
                f"after on_policy_updated of version {update.version} ({reason}), the engine's weight_version is "
                f"{self._engine.weight_version}"
            )
        self._version, self._is_live, self._known = update.version, True, None
        await self._enter_generation()

    async def shut_down(self) -> None:
        """Shuts the current backend down."""
        await self._within("shutdown", self.backend.shutdown())

    async def give_up(self) -> None:
        """Shuts the backend down, if there is one, after an interrupted check."""
        if self._backend is not None:
            await self._backend.shutdown()

    async def _enter_generation(self) -> None:
        if self.capabilities.colocated:
            await self._within("enter_generation", self.backend.enter_generation())
            self._is_generating = True

    async def _enter_training(self) -> None:
        if self._is_generating:
            await self._within("enter_training", self.backend.enter_training())
            self._is_generating = False

    async def _within(self, method: str, call: Awaitable[ResultT]) -> ResultT:
        training = self.config.training
        is_sync = method == "on_policy_updated"
        seconds = training.sync_timeout_seconds if is_sync else training.backend_timeout_seconds
        return await within(seconds, method, call)

    # ----------------------------------------------------------------------------------------------------------------
    # Sampling and training

    def engine_probe(self) -> EngineProbe:
        """Returns a probe that samples with the run file's settings."""
        rollout = self.config.rollout
        params = SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_response_tokens=rollout.max_response_tokens,
            stop_token_ids=tuple(self.parser.get_stop_token_ids()),
        )
        return EngineProbe(
            self.engine,
            self.prompts,
            params,
            samples=self.config.training.rollouts_per_group,
            vocabulary_size=self.vocabulary_size,
            takes_media=self.capabilities.vision,
            deterministic=self.capabilities.deterministic,
            logprob_tolerance=self.logprob_tolerance,
            request_timeout_seconds=rollout.request_timeout_seconds,
        )

    async def rollouts(self) -> list[TrainingSample]:
        """Samples a group per prompt with the live weight version; every fourth rollout has two turns."""
        if self.capabilities.colocated and not self._is_generating:
            await self._enter_generation()
        probe = self.engine_probe()
        samples = []
        for group, prompt in enumerate(self.prompts):
            seeds = [derive_seed(self._version, group, index) for index in range(probe.samples)]
            for index, output in enumerate(await probe.group(prompt, seeds)):
                turns, start = [(len(prompt), output)], len(prompt)
                ids = np.concatenate([prompt, output.token_ids])
                if index % 4 == 1:
                    ids = np.concatenate([ids, prompt[:OBSERVED_TOKENS]])
                    start = len(ids)
                    turns.append((start, await probe.single(ids, seeds[index])))
                    ids = np.concatenate([ids, turns[-1][1].token_ids])
                for _, said in turns:
                    if said.logprobs is None or said.weight_version != self._version:
                        raise Violation(
                            f"a completion has weight version {said.weight_version} and log-probabilities "
                            f"{said.logprobs}, but was sampled while version {self._version} was live"
                        )
                spoken = [said.logprobs for _, said in turns if said.logprobs is not None]
                samples.append(
                    TrainingSample(
                        group_id=group,
                        rollout_id=f"{group}-{index}",
                        token_ids=ids,
                        turn_spans=tuple((begin, begin + len(said.token_ids)) for begin, said in turns),
                        logprobs=np.concatenate(spoken),
                        advantages=np.zeros(sum(map(len, spoken)), np.float32),
                        weight_versions=(self._version,) * len(turns),
                    )
                )
        return samples

    async def logprobs(self, samples: Sequence[TrainingSample], policy: Policy = "current") -> list[Floats]:
        """Computes log-probabilities, ``(sampled_tokens,)`` per sample.

        Raises:
            NotApplicable: If the backend does not declare the policy.
        """
        if policy not in self.capabilities.policies:
            raise NotApplicable(f"it does not declare log-probabilities of the {policy} policy")
        await self._enter_training()
        computed = await self._within("compute_logprobs", self.backend.compute_logprobs(samples, policy))
        shapes = [np.shape(one) for one in computed]
        expected = [(sample.sampled_tokens,) for sample in samples]
        if shapes != expected:
            raise Violation(
                f"compute_logprobs returned arrays of shapes {shapes}, expected {expected} (sampled tokens)"
            )
        if not all(np.isfinite(one).all() for one in computed):
            raise Violation(f"compute_logprobs returned non-finite numbers for the {policy} policy")
        return [np.array(one) for one in computed]

    async def rejects(self, samples: Sequence[TrainingSample], policy: Policy) -> bool:
        """Returns whether the backend rejects a request for log-probabilities of a policy."""
        await self._enter_training()
        try:
            await self._within("compute_logprobs", self.backend.compute_logprobs(samples, policy))
        except StallError:
            raise
        except Exception:  # any error counts as a rejection
            return True
        return False

    async def train(self, *passes: Sequence[TrainingSample]) -> Outcome:
        """Does one optimizer step and publishes its weights."""
        before = await self.known_logprobs()
        result = await self._step_with(*passes)
        known = {sample.sample_id: mine for sample, mine in zip(self.samples, before, strict=True)}
        for sample in (sample for samples in passes for sample in samples):
            if sample.sample_id in result.tokens:
                _check_measures(result.tokens[sample.sample_id], known[sample.sample_id], self.logprob_tolerance)
        await self.publish("step")
        return Outcome(before, await self.known_logprobs(), result.metrics)

    async def known_logprobs(self) -> list[Floats]:
        """Returns log-probabilities of the samples under the live version, computed once."""
        if self._known is None:
            self._known = await self.logprobs(self.samples)
        return self._known

    async def step(self, *passes: Sequence[TrainingSample]) -> dict[str, float]:
        """Does one optimizer step and returns its metrics; the engine still has the previous weights."""
        return (await self._step_with(*passes)).metrics

    async def _step_with(self, *passes: Sequence[TrainingSample]) -> UpdateResult:
        await self._enter_training()
        for samples in passes:
            batch = self.backend.transform_to_backend_batch(samples)
            await self._within("process_backend_batch", self.backend.process_backend_batch(batch))
        trained = [sample for samples in passes for sample in samples]
        step = OptimizerStep(
            step=self._step + 1,
            total_steps=max(self.config.training.steps, 10),
            samples=len(trained),
            sampled_tokens=sum(sample.sampled_tokens for sample in trained),
            trajectories=len(trained),
        )
        result = await self._within("update_policy", self.backend.update_policy(step))
        self._step = step.step
        if not isinstance(result, UpdateResult):
            raise Violation(f"update_policy must return an UpdateResult, got {result!r:.80}")
        bad = {name: value for name, value in result.metrics.items() if not _is_finite(value)}
        if bad:
            raise Violation(f"update_policy reported metrics that are not finite numbers: {bad}")
        if self.engine.weight_version != self._version:
            raise Violation(
                f"update_policy changed the engine's weight_version to {self.engine.weight_version}; only "
                "on_policy_updated may"
            )
        return result

    # ----------------------------------------------------------------------------------------------------------------
    # Checkpoints

    async def save(self) -> Saved:
        """Saves a checkpoint as the trainer does, after a weight version has gone live."""
        logprobs = await self.known_logprobs()
        if self.capabilities.colocated:
            await self._enter_generation()
        self._saves += 1
        directory = self.directory / f"checkpoint-{self._saves}"
        directory.mkdir()
        await self._within("save_checkpoint", self.backend.save_checkpoint(directory))
        state = self.backend.state_dict()
        try:
            written = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise Violation(f"state_dict() must return JSON data: {error}") from error
        if written != state:
            raise Violation(f"state_dict() changes when written as JSON: {state} becomes {written}")
        return Saved(directory, written, self._step, logprobs)

    async def load(self, saved: Saved) -> None:
        """Loads a checkpoint and publishes its weights, as on a resume."""
        await self._enter_training()
        self.backend.load_state_dict(saved.state)
        await self._within("load_checkpoint", self.backend.load_checkpoint(saved.directory))
        self._step = saved.step
        await self.publish("resume")

    async def load_weights(self, saved: Saved) -> None:
        """Loads only the weights of a checkpoint and publishes them, as at the start of a run."""
        await self._enter_training()
        await self._within("load_weights", self.backend.load_weights(saved.directory))
        self._step = 0
        await self.publish("start")


def largest_gap(left: Sequence[Floats], right: Sequence[Floats]) -> float:
    """Returns the largest difference of two lists of arrays."""
    return max(float(np.abs(one - other).max()) for one, other in zip(left, right, strict=True))


def check_as_saved(probe: BackendProbe, found: Sequence[Floats], saved: Saved, what: str) -> None:
    """Checks log-probabilities against those of a checkpoint; ``what`` starts the message if they differ."""
    gap = largest_gap(found, saved.logprobs)
    if not gap <= probe.logprob_tolerance:
        raise Violation(f"{what} from the saved ones by up to {gap:.2g}")


def _check_measures(found: TokenMeasures, logprobs: Floats, tolerance: float) -> None:
    for name in ("logprobs", "entropies"):
        values = getattr(found, name)
        if values is not None and (np.shape(values) != logprobs.shape or not np.isfinite(values).all()):
            raise Violation(
                f"update_policy returned {name} of shape {np.shape(values)} for a sample with {len(logprobs)} sampled "
                "tokens, or some that are not finite"
            )
    if found.logprobs is not None and largest_gap([found.logprobs], [logprobs]) > tolerance:
        raise Violation(
            "update_policy returned log-probabilities that are not those under the weights before the step; they "
            f"differ by {largest_gap([found.logprobs], [logprobs]):.2g}"
        )


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
