"""Checks after a weight sync that the servers compute the same log-probabilities as the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np

from rllm_core.algorithms.agreement import LogprobDifference
from rllm_core.config import RunConfig
from rllm_core.errors import RunError
from rllm_core.types import Floats, SamplingParams, TrainingSample, token_ids
from rllm_verl.engine import VerlEngine
from rllm_verl.settings import has_experts, verl_settings

PROMPT = [{"role": "user", "content": "Say something."}]
# Per server. Many short completions instead of a long one, because they are sampled together, and differ.
COMPLETIONS = 8
# Per completion; each takes a server a pass. Fewer where equal tensors have already proved that it received everything.
TOKENS = 16
TOKENS_AFTER_PROOF = 4
# Default of verl.sync_tolerance, in nats, by verl.dtype; and the factor applied to it if the model has experts.
TOLERANCES = {"float32": 0.01, "bfloat16": 0.1}
EXPERTS_FACTOR = 2.0
ATTEMPTS = 2

Compute = Callable[[Sequence[TrainingSample]], Awaitable[list[Floats]]]


def sync_tolerance(config: RunConfig) -> float:
    """Returns the largest allowed difference in nats; assumes experts if the model's configuration is unknown."""
    settings = verl_settings(config)
    if settings.sync_tolerance is not None:
        return settings.sync_tolerance
    return TOLERANCES[settings.dtype] * (1.0 if has_experts(config.model.path) is False else EXPERTS_FACTOR)


class Canary:
    """Samples a few tokens from every server, and compares their log-probabilities with the trainer's.

    Args:
        engines: One engine per server, by server name.
        config: Run file.
        compute: The trainer's log-probabilities, with its current weights.
    """

    def __init__(self, engines: Mapping[str, VerlEngine], config: RunConfig, compute: Compute) -> None:
        self._engines = dict(engines)
        self._config = config
        self._compute = compute

    async def check(self, version: int, tokens: int) -> dict[str, float]:
        """Checks all servers after a weight sync. A server that differs too much is asked once more.

        Args:
            version: Weight version of the sync.
            tokens: Tokens per completion.

        Returns:
            Metrics of the first comparison.

        Raises:
            RunError: If a server has another weight version, or differs too much twice.
        """
        tolerance = sync_tolerance(self._config)
        suspects = list(self._engines)
        metrics: dict[str, float] = {}
        for attempt in range(ATTEMPTS):
            found = await self._differences(suspects, version, attempt, tokens)
            if not metrics:
                metrics = {
                    "sync_logprob_difference": max(each.typical for each in found.values()),
                    "sync_logprob_difference_max": max(each.largest for each in found.values()),
                }
            suspects = [name for name, each in found.items() if not each.typical <= tolerance]  # also NaN
            if not suspects:
                return metrics
        worst = max((found[name] for name in suspects), key=lambda each: np.nan_to_num(each.typical, nan=np.inf))
        raise RunError(
            f"weight sync to version {version}: trainer and servers disagree on the log-probabilities of "
            f"{worst.tokens} tokens by {worst.typical:.3g} on average without the largest eighth (max "
            f"{worst.largest:.3g}), {ATTEMPTS} times, at {', '.join(suspects)} of {len(self._engines)} servers, but "
            f"verl.sync_tolerance = {tolerance:g}: these servers do not have the trainer's weights, or compute with "
            "too little precision"
        )

    async def _differences(
        self, names: Sequence[str], version: int, attempt: int, tokens: int
    ) -> dict[str, LogprobDifference]:
        """Returns the differences per server name."""
        sampled = dict(
            zip(
                names,
                await asyncio.gather(*(self._sampled(name, version, attempt, tokens) for name in names)),
                strict=True,
            )
        )
        together = [sample for samples in sampled.values() for sample in samples]
        computed = iter(await self._compute(together))
        differences = {}
        for name, samples in sampled.items():
            theirs = [sample.logprobs for sample in samples if sample.logprobs is not None]
            differences[name] = LogprobDifference.between([next(computed) for _ in samples], theirs)
        return differences

    async def _sampled(self, name: str, version: int, attempt: int, tokens: int) -> list[TrainingSample]:
        engine = self._engines[name]
        assert engine.parser is not None
        prompt = token_ids(engine.parser.render(PROMPT))
        room = max(1, min(tokens, engine.max_model_tokens - len(prompt)))
        params = SamplingParams(temperature=self._config.rollout.temperature, max_response_tokens=room)
        first = (version * ATTEMPTS + attempt) * COMPLETIONS
        outputs = await engine.get_token_outputs_from_token_input(
            prompt, sampling_params=params, seeds=range(first, first + COMPLETIONS)
        )
        for output in outputs:
            versions = {output.weight_version, output.newest_weight_version or output.weight_version}
            if versions != {version}:
                raise RunError(f"after weight sync to version {version}, {name} still uses version {min(versions)}")
        start = len(prompt)
        return [
            TrainingSample(
                group_id=0,
                rollout_id=f"canary {number} of {name}",
                token_ids=np.concatenate([prompt, output.token_ids]),
                turn_spans=((start, start + len(output.token_ids)),),
                logprobs=output.logprobs,
                advantages=np.zeros(len(output.token_ids), np.float32),
                weight_versions=(version,),
            )
            for number, output in enumerate(outputs)
        ]
