"""The contract check of `BackendProtocol.load_weights`."""

from __future__ import annotations

import numpy as np

from rllm_core.backend import BackendProtocol
from rllm_devkit.checks.backend_probe import BackendProbe, check_as_saved
from rllm_devkit.checks.results import NotApplicable, Violation


async def check_initial_weights(probe: BackendProbe) -> str:
    """Checks that only the weights of a checkpoint are loaded, and that they become the reference policy."""
    if type(probe.backend).load_weights is BackendProtocol.load_weights:
        raise NotApplicable("it does not implement load_weights, so training.init_from is rejected")
    if probe.first is None or probe.update is None:
        raise NotApplicable("no update was possible")
    saved = await probe.save()
    if probe.resumes_in_another:
        await probe.shut_down()
        await probe.allocate()
    else:
        await probe.load(probe.first)  # the optimizer of this checkpoint has seen no gradient
    state = probe.backend.state_dict()
    await probe.load_weights(saved)
    check_as_saved(probe, await probe.known_logprobs(), saved, "after load_weights, log-probabilities differ")
    if probe.backend.state_dict() != state:
        raise Violation(f"load_weights changes state_dict() from {state} to {probe.backend.state_dict()}")
    still = [sample.model_copy(update={"advantages": np.zeros_like(sample.advantages)}) for sample in probe.samples]
    outcome = await probe.train(still)
    what = "after load_weights, advantages of 0 train: the optimizer is not new; log-probabilities differ"
    check_as_saved(probe, outcome.after, saved, what)
    if "reference" not in probe.capabilities.policies:
        return "loads the weights of a checkpoint, with a new optimizer"
    reference = await probe.logprobs(probe.samples, "reference")
    check_as_saved(probe, reference, saved, "after load_weights, the reference policy has other weights: it differs")
    return "loads the weights of a checkpoint, with a new optimizer, also as the reference policy"
