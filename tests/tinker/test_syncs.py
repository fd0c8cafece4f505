"""Planted faults of weight syncs, on a real server: the sampler keeps other weights than the trainer has."""

from __future__ import annotations

from typing import Any

import pytest
from rllm_tinker import sdk
from rllm_tinker.backend import TinkerBackend
from rllm_tinker.remote import RemotePolicy, Sampler
from test_weights import OVERLAPPING, ROWS, begin, train

from rllm_core.backend import PolicyUpdate
from rllm_core.errors import RunError
from rllm_core.types import SamplingParams

LEARNS = ("optimizer.learning_rate=0.02", "tinker.sync_tolerance=0.1")
STEPS = 3


async def steps(backend: TinkerBackend, parser: Any, prompt_ids: Any, sample_of: Any) -> int:
    """Trains on its own completions; returns the number of completed steps."""
    engine = await begin(backend, parser)
    for version in range(STEPS):
        params = SamplingParams(max_response_tokens=6)
        outputs = await engine.get_token_outputs_from_token_input(
            prompt_ids, sampling_params=params, seeds=range(ROWS * version, ROWS * (version + 1))
        )
        samples = [
            sample_of(output.token_ids, 1.0 if place % 2 else -1.0, logprobs=output.logprobs, version=version)
            for place, output in enumerate(outputs)
        ]
        await train(backend, samples, step=version + 1)
        await backend.on_policy_updated(PolicyUpdate(version + 1, version + 1, "step"))
    return STEPS


@pytest.mark.parametrize("overrides", [(), OVERLAPPING], ids=["synchronous", "asynchronous"])
async def test_without_a_fault_all_steps_are_done(
    server, make_backend, parser, prompt_ids, sample_of, overrides
) -> None:
    backend = make_backend(server, *LEARNS, *overrides)
    assert await steps(backend, parser, prompt_ids, sample_of) == STEPS
    await backend.shutdown()


async def test_weights_that_never_arrive_end_the_run(
    server, make_backend, parser, prompt_ids, sample_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All versions are sampled from a model with the initial weights."""

    async def make_sampler(self: RemotePolicy, version: int, state: str | None) -> None:
        trainer = await self._server.create("a model to sample from")
        client = await self._server.made("saving", trainer.save_weights_and_get_sampling_client)
        self.sampler = Sampler(client, version, self._generation)

    monkeypatch.setattr(RemotePolicy, "_make_sampler", make_sampler)
    backend = make_backend(server, *LEARNS)
    with pytest.raises(RunError, match=r"weight version 1: the server's sampler and trainer disagree .* = 0\.1: "):
        await steps(backend, parser, prompt_ids, sample_of)
    await backend.shutdown()


async def test_weights_that_arrive_a_version_late_end_the_run(
    server, make_backend, parser, prompt_ids, sample_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[str] = []

    def load_state(trainer: Any, path: str) -> Any:
        paths.append(path)
        return plain(trainer, paths[-2] if len(paths) > 1 else path)

    plain = sdk.load_state
    monkeypatch.setattr(sdk, "load_state", load_state)
    backend = make_backend(server, *LEARNS, *OVERLAPPING)
    with pytest.raises(RunError, match=r"weight version 1: the server's sampler and trainer disagree "):
        await steps(backend, parser, prompt_ids, sample_of)
    await backend.shutdown()
