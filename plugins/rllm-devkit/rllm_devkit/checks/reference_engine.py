"""The contract check of `BackendProtocol.init_reference_engine`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rllm_core.backend import BackendProtocol
from rllm_core.engine import RolloutEngine
from rllm_core.types import TokenOutput
from rllm_devkit.checks.backend_probe import BackendProbe
from rllm_devkit.checks.results import NotApplicable, Violation


async def check_reference_engine(probe: BackendProbe) -> str:
    """Checks that a second engine samples from the weights that the run started from, whatever is trained since."""
    backend = probe.backend
    if type(backend).init_reference_engine is BackendProtocol.init_reference_engine:
        raise NotApplicable("it has no init_reference_engine, so scorers that ask version 0 of the policy are rejected")
    if probe.first is None or probe.update is None:
        raise NotApplicable("no update was possible")
    if not probe.capabilities.deterministic:
        raise NotApplicable("without determinism, two engines cannot be compared by what they sample")
    reference = await probe.reference_engine()
    if reference.weight_version != 0:
        raise Violation(f"the weight_version of the reference engine is {reference.weight_version}, not 0")
    if reference.parser is not probe.engine.parser:
        raise Violation("the reference engine has another parser than the first engine")
    await probe.load(probe.first)  # the weights that this run started from
    at_start = await _sampled(probe, probe.engine)
    _check_same(probe, await _sampled(probe, reference), at_start, "the weights of the start")
    pushed = [
        sample.model_copy(update={"advantages": np.full_like(sample.advantages, (-1.0) ** number)})
        for number, sample in enumerate(probe.samples)
    ]
    await probe.train(pushed)
    _check_same(probe, await _sampled(probe, reference), at_start, "the weights of the start, after an update")
    if type(backend).load_weights is BackendProtocol.load_weights:
        return "samples from the weights of the start"
    await probe.load_weights(await probe.save())
    loaded = await _sampled(probe, probe.engine)
    _check_same(probe, await _sampled(probe, reference), loaded, "the weights of another run, after load_weights")
    return "samples from the weights of the start, also after load_weights"


async def _sampled(probe: BackendProbe, engine: RolloutEngine) -> list[TokenOutput]:
    sampling = replace(probe.engine_probe(), engine=engine)
    return [await sampling.single(prompt, seed=number) for number, prompt in enumerate(probe.prompts)]


def _check_same(probe: BackendProbe, found: list[TokenOutput], expected: list[TokenOutput], what: str) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        is_same = mine.token_ids.tolist() == theirs.token_ids.tolist()
        if not is_same or mine.logprobs is None or theirs.logprobs is None:
            raise Violation(f"the reference engine does not sample from {what}: it samples other tokens")
        gap = float(np.abs(mine.logprobs - theirs.logprobs).max())
        if not gap <= probe.logprob_tolerance:
            raise Violation(f"the reference engine does not sample from {what}: log-probabilities differ by {gap:.2g}")
