"""A backend in this process, from the first weight sync on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from rllm_verl.backend import VerlBackend
from rllm_verl.engine import VerlEngine
from transformers import AutoModelForCausalLM

from rllm_core.assembly.parts import assemble
from rllm_core.backend import OptimizerStep, PolicyUpdate
from rllm_core.config import RunConfig
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager
from rllm_core.types import Floats, SamplingParams, TokenIds, TokenOutput, TrainingSample, token_ids


@dataclass
class Session:
    """A backend with its servers, and an event loop with the same lifetime.

    Attributes:
        backend: Backend that trains and publishes.
        engine: Engine that samples.
        parser: Parser of both.
        run: Function that runs a coroutine to completion.
    """

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
        self.version += 1
        self.run(self.backend.on_policy_updated(PolicyUpdate(self.version, self.step, "step")))

    async def sample(self, count: int, tokens: int = 6, *, seed: int = 0, stop: bool = True) -> list[TokenOutput]:
        stop_ids = tuple(self.parser.get_stop_token_ids()) if stop else ()
        params = SamplingParams(max_response_tokens=tokens, stop_token_ids=stop_ids)
        return await self.engine.get_token_outputs_from_token_input(
            self.prompt, sampling_params=params, seeds=range(seed, seed + count)
        )

    def sampled(
        self, outputs: Sequence[TokenOutput], advantages: Sequence[float] | None = None
    ) -> list[TrainingSample]:
        """Samples of one turn."""
        samples = []
        for output, advantage in zip(outputs, advantages or [0.0] * len(outputs), strict=True):
            start, count = len(self.prompt), len(output.token_ids)
            samples.append(
                TrainingSample(
                    group_id=0,
                    rollout_id="rollout",
                    token_ids=np.concatenate([self.prompt, output.token_ids]),
                    turn_spans=((start, start + count),),
                    logprobs=output.logprobs,
                    advantages=np.full(count, advantage, np.float32),
                    weight_versions=(output.weight_version,),
                )
            )
        return samples

    def logprobs(self, samples: Sequence[TrainingSample], policy: Any = "current") -> list[Floats]:
        found: list[Floats] = self.run(self.backend.compute_logprobs(samples, policy))
        return found

    def train(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        """Takes one optimizer step, in two passes."""
        proximal, reference = self.logprobs(samples, "proximal"), self.logprobs(samples, "reference")
        whole = [
            TrainingSample.model_validate({**dict(s), "proximal_logprobs": p, "reference_logprobs": r})
            for s, p, r in zip(samples, proximal, reference, strict=True)
        ]
        for part in (whole[:1], whole[1:]):
            self.run(self.backend.process_backend_batch(self.backend.transform_to_backend_batch(part)))
        self.step += 1
        tokens = sum(sample.sampled_tokens for sample in samples)
        step = OptimizerStep(
            step=self.step, total_steps=100, samples=len(samples), sampled_tokens=tokens, trajectories=len(samples)
        )
        metrics: dict[str, float] = self.run(self.backend.update_policy(step)).metrics
        return metrics


@contextmanager
def opened(config: RunConfig) -> Iterator[Session]:
    """Starts a backend with its servers, and publishes the first version."""
    assembly = assemble(config, PluginManager.from_environment())
    backend = assembly.backend
    assert isinstance(backend, VerlBackend)
    parser = assembly.parser()
    with asyncio.Runner() as runner:
        try:
            engine = runner.run(backend.init_rollout_engine(parser))
            runner.run(backend.on_policy_updated(PolicyUpdate(0, 0, "start")))
            yield Session(backend, engine, parser, runner.run)
        finally:
            runner.run(backend.shutdown())


def keep_weights_only(folder: Path) -> None:
    """Deletes optimizer and other states of verl's checkpoint in a folder."""
    for file in (folder / "actor").rglob("*_world_size_*"):
        if not file.name.startswith("model_"):
            file.unlink()


def greatest(ones: Sequence[Floats], others: Sequence[Floats]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(ones, others, strict=True))


def rollout_logprobs(samples: Sequence[TrainingSample]) -> list[Floats]:
    assert all(sample.logprobs is not None for sample in samples)
    return [sample.logprobs for sample in samples if sample.logprobs is not None]


def in_peft(base: Path, adapter: Path | None, samples: Sequence[TrainingSample]) -> list[Floats]:
    """Log-probabilities of sampled tokens, by PEFT and transformers in one process."""
    policy = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        policy = PeftModel.from_pretrained(policy, str(adapter))
    found = []
    for sample in samples:
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor(sample.token_ids)[None]).logits[0]
        ids = torch.tensor(sample.token_ids[1:])[:, None]
        logprobs = logits[:-1].log_softmax(-1).gather(-1, ids)[:, 0].numpy()
        found.append(logprobs[sample.loss_mask[1:]])
    return found
