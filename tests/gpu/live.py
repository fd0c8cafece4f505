"""A backend and its servers in this process, for tests that inspect it between two calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cases import SMALL
from rllm_verl.backend import VerlBackend
from rllm_verl.engine import VerlEngine

from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.backend import OptimizerStep, PolicyUpdate
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager
from rllm_core.types import Floats, SamplingParams, TokenIds, TokenOutput, TrainingSample, token_ids


@dataclass
class Live:
    """Running backend with its engine and parser, the weight version and the step."""

    backend: VerlBackend
    engine: VerlEngine
    parser: BaseParser
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    version: int = 0
    step: int = 0

    @property
    def prompt(self) -> TokenIds:
        return token_ids(self.parser.render([{"role": "user", "content": "sort: dbca"}]))

    def publish(self) -> None:
        """Sends the trainer's weights to the servers."""
        self.version += 1
        self.run(self.backend.on_policy_updated(PolicyUpdate(self.version, self.step, "step")))

    async def sample(self, count: int, tokens: int, *, seed: int = 0) -> list[TokenOutput]:
        """Samples completions of exactly this many tokens."""
        return await self.engine.get_token_outputs_from_token_input(
            self.prompt, sampling_params=SamplingParams(max_response_tokens=tokens), seeds=range(seed, seed + count)
        )

    def samples(self, count: int, tokens: int = 64) -> list[TrainingSample]:
        """Samples completions and turns them into training samples, half of them good and half bad."""
        start = len(self.prompt)
        return [
            TrainingSample(
                group_id=0,
                rollout_id=str(number),
                token_ids=np.concatenate([self.prompt, output.token_ids]),
                turn_spans=((start, start + tokens),),
                logprobs=output.logprobs,
                advantages=np.full(tokens, 1.0 - 2 * (number % 2), np.float32),
                weight_versions=(output.weight_version,),
            )
            for number, output in enumerate(self.run(self.sample(count, tokens, seed=self.version * count)))
        ]

    def logprobs(self, samples: Sequence[TrainingSample]) -> Floats:
        """Returns the trainer's log-probabilities of all sampled tokens, ``(sampled_tokens,)``."""
        return np.concatenate(self.run(self.backend.compute_logprobs(samples)))

    def gap(self, samples: Sequence[TrainingSample]) -> float:
        """Returns the mean absolute difference between the trainer's and the servers' log-probabilities."""
        theirs = [sample.logprobs for sample in samples if sample.logprobs is not None]
        return float(np.abs(self.logprobs(samples) - np.concatenate(theirs)).mean())

    def train(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        """Runs one optimizer step and returns its metrics."""
        self.run(self.backend.process_backend_batch(self.backend.transform_to_backend_batch(samples)))
        self.step += 1
        sampled_tokens = sum(sample.sampled_tokens for sample in samples)
        step = OptimizerStep(
            step=self.step,
            total_steps=100,
            samples=len(samples),
            sampled_tokens=sampled_tokens,
            trajectories=len(samples),
        )
        found: dict[str, float] = self.run(self.backend.update_policy(step)).metrics
        return found


def fixed_samples(count: int, tokens: int, *, vocabulary: int) -> list[TrainingSample]:
    """Returns the same random samples on every call, of different lengths up to ``tokens``."""
    generator = np.random.default_rng(0)
    samples = []
    for number in range(count):
        length = int(generator.integers(tokens // 2, tokens + 1))
        ids = generator.integers(300, vocabulary, length + 8).astype(np.int32)
        samples.append(
            TrainingSample(
                group_id=0,
                rollout_id=str(number),
                token_ids=ids,
                turn_spans=((8, length + 8),),
                logprobs=np.full(length, -12.0, np.float32),
                advantages=np.full(length, 1.0 - 2 * (number % 2), np.float32),
                weight_versions=(0,),
            )
        )
    return samples


@contextmanager
def live(model: Path, *overrides: str) -> Iterator[Live]:
    """Yields a backend whose servers have the initial weights."""
    plugins = PluginManager.from_environment()
    given = [f"model.path={model}", *SMALL, *overrides]
    config = load_run_config("sort", plugins, overrides=given, backend="verl", parser="chat_template")
    assembly = assemble(config, plugins)
    backend = assembly.backend
    assert isinstance(backend, VerlBackend)
    parser = assembly.parser()
    with asyncio.Runner() as runner:
        try:
            engine = runner.run(backend.init_rollout_engine(parser))
            runner.run(backend.on_policy_updated(PolicyUpdate(0, 0, "start")))
            yield Live(backend, engine, parser, runner.run)
        finally:
            runner.run(backend.shutdown())
