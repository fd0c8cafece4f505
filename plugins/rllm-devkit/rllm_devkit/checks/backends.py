"""Contract checks for backends; see `check_backend`."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from rllm_core.algorithms.aggregation import AGGREGATIONS
from rllm_core.assembly.support import Support
from rllm_core.backend import BackendProtocol, Capabilities, Policy
from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError
from rllm_core.parser import BaseParser
from rllm_core.types import Floats, TrainingSample
from rllm_devkit.checks.backend_probe import BackendProbe, Outcome, Saved, check_as_saved, largest_gap
from rllm_devkit.checks.engines import ENGINE_CHECKS, prompts_of
from rllm_devkit.checks.initial_weights import check_initial_weights
from rllm_devkit.checks.reference_engine import check_reference_engine
from rllm_devkit.checks.results import Check, CheckResult, NotApplicable, Violation, checked
from rllm_devkit.checks.watch import child_processes

# Two ways to compute the same update may differ by this share of it, because Adam turns gradients that are pure
# rounding noise into steps of full length.
UPDATE_SHARE = 0.05
SAME_METRIC = 1e-3


async def check_backend(
    make: Callable[[RunConfig], BackendProtocol[Any]],
    config: RunConfig,
    parser: BaseParser,
    directory: Path,
    *,
    vocabulary_size: int | None = None,
    resumes_in_another: bool = False,
    logprob_tolerance: float = 1e-4,
) -> list[CheckResult]:
    """Checks a backend and its engine against their contracts.

    In a test::

        results = asyncio.run(check_backend(lambda config: Mine(config, plugins), config, parser, tmp_path))
        assert not [result for result in results if result.outcome == "failed"]

    The backend is allocated once and shut down at the end. Capabilities it does not declare are not checked.

    Args:
        make: Constructs a backend.
        config: Run file. Only advantages may move weights: no KL in the loss, entropy bonus or weight decay. The
            learning rate must be high enough for updates to exceed rounding. Groups have
            ``training.rollouts_per_group`` rollouts with at most ``rollout.max_response_tokens`` tokens. Timeouts of
            all calls also come from here.
        parser: Parser for the model.
        directory: Empty folder for checkpoints.
        vocabulary_size: See `check_engine`.
        resumes_in_another: Whether to load a checkpoint into a second backend, after shutting the first one down.
        logprob_tolerance: Maximum difference of the trainer's log-probabilities, and of scores, from sampling.

    Returns:
        One result per check; those of `check_engine` have the prefix ``engine:``. An exception raised by the backend
        fails the check that called it.
    """
    algorithm = config.algorithm
    for key, value in (
        ("algorithm.entropy_coefficient", algorithm.entropy_coefficient),
        ("algorithm.kl.coefficient", algorithm.kl.coefficient),
        ("optimizer.weight_decay", config.optimizer.weight_decay),
    ):
        if value:
            raise ValueError(f"{key} = {value} must be 0: for the check, only advantages may move weights")
    probe = BackendProbe(
        make,
        config,
        parser,
        directory,
        prompts_of(parser),
        logprob_tolerance=logprob_tolerance,
        resumes_in_another=resumes_in_another,
        vocabulary_size=vocabulary_size,
    )
    try:
        results = await checked(probe, BEFORE_TRAINING)
        results += await _engine_results(probe)
        return results + await checked(probe, TRAINING)
    except BaseException:
        await probe.give_up()
        raise


async def _engine_results(probe: BackendProbe) -> list[CheckResult]:
    try:
        engine_probe = probe.engine_probe()
    except NotApplicable as reason:
        return [CheckResult(f"engine: {name}", "skipped", str(reason)) for name in ENGINE_CHECKS]
    engine_probe.params = engine_probe.params_with(temperature=1.0, top_p=1.0, top_k=0)
    found = await checked(engine_probe, ENGINE_CHECKS)
    return [CheckResult(f"engine: {result.name}", result.outcome, result.detail) for result in found]


# --------------------------------------------------------------------------------------------------------------------
# Before training


async def _construction(probe: BackendProbe) -> str:
    for _ in range(2):  # twice, because imports for the first backend may leave resources behind
        before = _held()
        backend = probe.make(probe.config)
        if not isinstance(backend, BackendProtocol):
            raise Violation(f"{backend!r:.80} is not a BackendProtocol")
        if not getattr(type(backend), "name", ""):
            raise Violation("the class has no name; set the class attribute `name`")
        unchecked = backend.validate_config()
        if not isinstance(unchecked, list) or not all(isinstance(line, str) for line in unchecked):
            raise Violation(f"validate_config must return a list of strings, got {unchecked!r:.200}")
        new = [what for what, count in _held().items() if count > before[what]]
        await backend.shutdown()  # as after a failed allocation
    if new:
        raise Violation(f"a backend must not allocate before init_rollout_engine, but there are new {', '.join(new)}")
    return "allocates nothing, and can be shut down"


def _held() -> dict[str, int]:
    """Counts the threads, child processes and open files of this process."""
    # Leave timers out: the core times imports with them, and they end by themselves.
    threads = [thread for thread in threading.enumerate() if not isinstance(thread, threading.Timer)]
    files = Path("/dev/fd")
    open_files = len(list(files.iterdir())) if files.is_dir() else 0
    return {"threads": len(threads), "child processes": child_processes(), "open files": open_files}


async def _capabilities(probe: BackendProbe) -> str:
    config, backend = probe.config, probe.make(probe.config)
    before = copy.deepcopy(config)
    declared, again = [type(backend).capabilities(config) for _ in range(2)]
    if not isinstance(declared, Capabilities):
        raise Violation(f"capabilities() must return Capabilities, got {declared!r:.80}")
    if declared != again:
        raise Violation("a second call of capabilities() returns something else")
    if config != before:
        raise Violation("capabilities() modifies the run file passed to it")
    for what, names, known in (
        ("aggregations", declared.aggregations, AGGREGATIONS),
        ("policies", declared.policies, frozenset(get_args(Policy))),
    ):
        if not names <= known:
            raise Violation(f"capabilities() declares unknown {what}: {', '.join(sorted(names - known))}")
    if not (declared.lora or declared.full):
        raise Violation("capabilities() must declare lora, full, or both")
    if declared.kl_loss and "reference" not in declared.policies:
        raise Violation("capabilities() declares kl_loss, which needs 'reference' in policies")
    losses = Support.of(declared, backend.plugins).losses if declared.torch_losses else sorted(declared.losses)
    choices: list[dict[str, Any]] = [{"loss": loss, "loss_options": {}} for loss in losses]
    choices += [{"aggregation": aggregation} for aggregation in sorted(declared.aggregations)]
    for choice in choices:
        algorithm = config.algorithm.model_copy(update=choice)
        try:
            probe.make(config.model_copy(update={"algorithm": algorithm})).validate_config()
        except ConfigError as error:
            [(name, value), *_] = choice.items()
            raise Violation(f"it declares {name} {value!r}, but rejects it: {error}") from error
    return f"{len(losses)} losses, {len(declared.aggregations)} aggregations, {len(declared.policies)} policies"


async def _start(probe: BackendProbe) -> str:
    engine = await probe.allocate()
    if engine.supports_token_in_token_out is not probe.capabilities.token_in_token_out:
        raise Violation(
            f"token_in_token_out is declared as {probe.capabilities.token_in_token_out}, but the engine's "
            f"supports_token_in_token_out is {engine.supports_token_in_token_out}"
        )
    await probe.publish("start")
    probe.samples = await probe.rollouts()
    return f"{len(probe.samples)} rollouts of weight version 0"


# --------------------------------------------------------------------------------------------------------------------
# Training


def _samples(probe: BackendProbe) -> list[TrainingSample]:
    if not probe.samples:
        raise NotApplicable("nothing could be sampled")
    return probe.samples


def _first(probe: BackendProbe) -> Saved:
    if probe.first is None:
        raise NotApplicable("no checkpoint could be saved")
    return probe.first


def _update(probe: BackendProbe) -> Outcome:
    if probe.update is None:
        raise NotApplicable("no update was possible")
    return probe.update


def _with_advantages(samples: Sequence[TrainingSample], seed: int) -> list[TrainingSample]:
    drawn = np.random.default_rng(seed).normal(size=len(samples))
    return [_advantage(sample, float(value)) for sample, value in zip(samples, drawn, strict=True)]


def _advantage(sample: TrainingSample, value: float) -> TrainingSample:
    return sample.model_copy(update={"advantages": np.full(sample.sampled_tokens, value, np.float32)})


def _mean_gap(left: Sequence[Floats], right: Sequence[Floats]) -> float:
    return float(np.abs(np.concatenate(left) - np.concatenate(right)).mean())


async def _logprobs(probe: BackendProbe) -> str:
    samples = _samples(probe)
    seen = []
    for policy in get_args(Policy):
        if policy in probe.capabilities.policies:
            gap = await _agreement(probe, samples, policy)
            seen.append(f"{policy} within {gap:.2g}")
        elif not await probe.rejects(samples, policy):
            raise Violation(f"it computes log-probabilities of the {policy} policy, but does not declare that policy")
    if not seen:
        raise NotApplicable("it computes no log-probabilities")
    return f"difference between trainer and engine: {', '.join(seen)}"


async def _agreement(probe: BackendProbe, samples: Sequence[TrainingSample], policy: Policy) -> float:
    sampled = [sample.logprobs for sample in samples if sample.logprobs is not None]
    gap = largest_gap(await probe.logprobs(samples, policy), sampled)
    if not gap <= probe.logprob_tolerance:
        raise Violation(
            f"with equal weight versions, log-probabilities of the {policy} policy differ from those of sampling by up "
            f"to {gap:.2g}, limit {probe.logprob_tolerance:g}"
        )
    return gap


async def _batches(probe: BackendProbe) -> str:
    samples = _with_advantages(_samples(probe), seed=1)
    before = [sample.to_json() for sample in samples]
    for _ in range(2):
        probe.backend.transform_to_backend_batch(samples)
    if [sample.to_json() for sample in samples] != before:
        raise Violation("transform_to_backend_batch modifies the samples passed to it")
    outcome = await probe.train([_advantage(sample, 0.0) for sample in samples])
    if largest_gap(outcome.before, outcome.after) > probe.logprob_tolerance:
        raise Violation(
            "batches that were transformed but not processed, or advantages of 0, must not train: log-probabilities "
            f"moved by {largest_gap(outcome.before, outcome.after):.2g}"
        )
    return "transforming changes nothing, and advantages of 0 train nothing"


async def _first_checkpoint(probe: BackendProbe) -> str:
    _samples(probe)
    probe.first = await probe.save()
    return ", ".join(sorted(path.name for path in probe.first.directory.iterdir())) or "an empty folder"


async def _updates(probe: BackendProbe) -> str:
    samples, tolerance = _samples(probe), probe.logprob_tolerance
    reference = await probe.logprobs(samples, "reference") if "reference" in probe.capabilities.policies else None
    outcome = await probe.train(_with_advantages(samples, seed=1))
    moved = _mean_gap(outcome.before, outcome.after)
    if not moved > tolerance:
        raise Violation(
            f"an update moved log-probabilities by {moved:.2g} on average, not more than logprob_tolerance "
            f"{tolerance:g}: nothing is trained, or optimizer.learning_rate is too low"
        )
    probe.update = outcome
    if reference is not None and largest_gap(reference, await probe.logprobs(samples, "reference")) > tolerance:
        raise Violation("an update changed the log-probabilities of the reference policy")
    fresh = await probe.rollouts()
    gap = await _agreement(probe, fresh, "current")
    return f"moves log-probabilities by {moved:.2g}; completions sampled afterwards agree within {gap:.2g}"


def _check_same_update(probe: BackendProbe, found: Outcome, expected: Outcome, what: str) -> float:
    moved, gap = _mean_gap(expected.before, expected.after), _mean_gap(found.after, expected.after)
    if not moved > probe.logprob_tolerance:
        raise Violation(
            f"an update moved log-probabilities by only {moved:.2g} on average, too little for a comparison"
        )
    if not gap <= UPDATE_SHARE * moved:
        raise Violation(
            f"{what}: log-probabilities differ by {gap:.2g} on average after an update that moves them by {moved:.2g}"
        )
    for name in {"loss", "grad_norm"} & found.metrics.keys() & expected.metrics.keys():
        mine, theirs = found.metrics[name], expected.metrics[name]
        if not abs(mine - theirs) <= SAME_METRIC * max(abs(mine), abs(theirs)) + probe.logprob_tolerance:
            raise Violation(f"{what}: {name} is {mine:.6g}, expected {theirs:.6g}")
    return gap / moved


async def _checkpoint(probe: BackendProbe) -> str:
    samples = _samples(probe)
    _update(probe)
    saved = await probe.save()
    third = _with_advantages(samples, seed=2)
    expected = await probe.train(third)
    gap = await _resumed(probe, saved, third, expected, "after load_checkpoint")
    if probe.resumes_in_another:
        await probe.shut_down()
        await probe.allocate()
        gap = max(gap, await _resumed(probe, saved, third, expected, "after load_checkpoint in another backend"))
    where = "the same and in another backend" if probe.resumes_in_another else "the same backend"
    return f"after loading in {where}, the next update differs by {gap:.2g} of its size"


async def _resumed(
    probe: BackendProbe, saved: Saved, samples: Sequence[TrainingSample], expected: Outcome, what: str
) -> float:
    await probe.load(saved)
    check_as_saved(probe, await probe.known_logprobs(), saved, f"{what}, log-probabilities differ")
    fresh = await probe.rollouts()
    await _agreement(probe, fresh, "current")
    return _check_same_update(probe, await probe.train(samples), expected, f"{what}, the next update differs")


async def _accumulation(probe: BackendProbe) -> str:
    declared, samples = probe.capabilities, _with_advantages(_samples(probe), seed=1)
    expected = _update(probe)
    if not (declared.streaming and declared.deferred_normalisation):
        raise NotApplicable("it does not declare streaming and deferred_normalisation, so a step is one pass")
    await probe.load(_first(probe))
    cut = max(1, len(samples) // 4)
    found = await probe.train(samples[:cut], samples[cut:])
    share = _check_same_update(probe, found, expected, "the same samples in two passes give another update")
    return f"the updates of one and of two passes differ by {share:.2g} of their size"


async def _proximal(probe: BackendProbe) -> str:
    declared, samples = probe.capabilities, _with_advantages(_samples(probe), seed=1)
    expected = _update(probe)
    if not (declared.interpolated_proximal or declared.forward_is_proximal):
        raise NotApplicable("it declares neither interpolated_proximal nor forward_is_proximal")
    await probe.load(_first(probe))
    given = [
        sample.model_copy(update={"proximal_fractions": np.ones(len(sample.turn_spans), np.float32)})
        for sample in samples
    ]
    what = "on policy, samples with proximal_fractions give another update"
    share = _check_same_update(probe, await probe.train(given), expected, what)
    return f"on policy, proximal_fractions change an update by {share:.2g} of its size"


async def _advantages(probe: BackendProbe) -> str:
    samples = _samples(probe)
    _update(probe)
    first = _first(probe)
    # Take the least likely sample, because a certain one could not become likelier.
    chosen = int(np.argmin([float(logprobs.sum()) for logprobs in first.logprobs]))
    changes = []
    for advantage in (1.0, -1.0):
        await probe.load(first)
        given = [_advantage(sample, advantage * (place == chosen)) for place, sample in enumerate(samples)]
        outcome = await probe.train(given)
        change = float((outcome.after[chosen] - outcome.before[chosen]).sum())
        if not change * advantage > probe.logprob_tolerance:
            raise Violation(
                f"an advantage of {advantage:+g} changed the log-probability of its completion by {change:+.2g}"
            )
        changes.append(f"{change:+.2g}")
    return f"one of 1 and one of -1 change the log-probability of their completion by {' and '.join(changes)}"


async def _shutdown(probe: BackendProbe) -> str:
    backend, nothing = probe.backend, probe.directory / "nothing"
    nothing.mkdir()
    try:
        await backend.load_checkpoint(nothing)
    except Exception as error:  # any type; its text is shown to users
        refusal = " ".join(f"{type(error).__name__}: {error}".split())
    else:
        raise Violation("load_checkpoint must raise an error for an empty folder")
    for _ in range(2):
        await probe.shut_down()
    return f"works after an error ({refusal:.80}), and twice"


BEFORE_TRAINING: dict[str, Check[BackendProbe]] = {
    "construction": _construction,
    "capabilities": _capabilities,
    "start": _start,
}
TRAINING: dict[str, Check[BackendProbe]] = {
    "log-probabilities": _logprobs,
    "batches": _batches,
    "saving": _first_checkpoint,
    "updates": _updates,
    "checkpoint": _checkpoint,
    "accumulation": _accumulation,
    "proximal": _proximal,
    "advantages": _advantages,
    "reference engine": check_reference_engine,
    "initial weights": check_initial_weights,
    "shutdown": _shutdown,
}
