"""Contract checks for engines; see `check_engine`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from rllm_core.engine import EngineError, RolloutEngine
from rllm_core.parser import BaseParser
from rllm_core.types import FinishReason, Floats, MediaChunk, SamplingParams, TokenIds, TokenOutput, token_ids
from rllm_devkit.checks.completions import QUESTION, SENTENCES
from rllm_devkit.checks.engine_probe import EngineProbe
from rllm_devkit.checks.results import Check, CheckResult, NotApplicable, Violation, checked

CERTAINLY_OUTSIDE = 2**31 - 1  # the largest int32, the dtype of token ids
MAX_STOPS = 16
# When to cancel a call: after some event-loop turns, plus a share of the call's duration.
CANCELLED_AFTER = ((1, 0.0), (4, 0.0), (0, 0.3), (0, 0.6))
# The core's tolerance: a float32 softmax can end slightly above 0.
HIGHEST_LOGPROB = 1e-3
# Equal completions are a failure only if they would occur by chance with a probability below this.
CHANCE = 1e-6


async def check_engine(
    engine: RolloutEngine,
    *,
    prompts: Sequence[Sequence[int] | TokenIds] = (),
    vocabulary_size: int | None = None,
    takes_media: bool = False,
    deterministic: bool = False,
    samples: int = 16,
    max_response_tokens: int = 8,
    logprob_tolerance: float = 1e-4,
    request_timeout_seconds: float = 60.0,
) -> list[CheckResult]:
    """Checks a running engine against the contract of `RolloutEngine`.

    In a test: ``assert not [r for r in await check_engine(mine) if r.outcome == "failed"]``. The check allocates
    nothing. `check_backend` also checks its backend's engine.

    Args:
        engine: Engine to check. Its weights must not change during the check.
        prompts: Prompts, ``(tokens,)`` each. Rendered by the engine's parser if empty.
        vocabulary_size: Number of token ids; None if only the engine knows it.
        takes_media: Whether prompts may contain media.
        deterministic: Whether equal seeds give equal completions.
        samples: Completions per prompt.
        max_response_tokens: Maximum tokens of most completions.
        logprob_tolerance: Maximum difference between scored and sampled log-probabilities.
        request_timeout_seconds: Timeout of a call, in seconds.

    Returns:
        One result per check. An exception raised by the engine fails the check that called it.
    """
    stops: tuple[int, ...] = ()
    if engine.parser is not None:
        stops = tuple(engine.parser.get_stop_token_ids())
        prompts = prompts or prompts_of(engine.parser)
    if not prompts:
        raise ValueError("an engine without a parser needs prompts; pass check_engine(..., prompts=[...])")
    probe = EngineProbe(
        engine,
        [token_ids(prompt) for prompt in prompts],
        SamplingParams(max_response_tokens=max_response_tokens, stop_token_ids=stops),
        samples=samples,
        vocabulary_size=vocabulary_size,
        takes_media=takes_media,
        deterministic=deterministic,
        logprob_tolerance=logprob_tolerance,
        request_timeout_seconds=request_timeout_seconds,
    )
    return await checked(probe, ENGINE_CHECKS)


def prompts_of(parser: BaseParser) -> list[TokenIds]:
    """Renders two conversations, ``(tokens,)`` each."""
    answer = {"role": "assistant", "content": SENTENCES[0]}
    conversations = ([QUESTION], [QUESTION, answer, {**QUESTION, "content": "And then?"}])
    return [token_ids(parser.render(conversation)) for conversation in conversations]


# --------------------------------------------------------------------------------------------------------------------
# The checks; each returns its findings


async def _tokens(probe: EngineProbe) -> str:
    if not probe.engine.supports_token_in_token_out:
        raise NotApplicable("supports_token_in_token_out is False")
    answers, limit, size = [], probe.params.max_response_tokens, probe.vocabulary_size
    for prompt in probe.prompts:
        before = prompt.copy()
        answers.append(await probe.group(prompt, range(probe.samples)))
        if not np.array_equal(before, prompt):
            raise Violation("it modifies the prompt passed to it")
    for output in (output for outputs in answers for output in outputs):
        if len(output.token_ids) > limit:
            raise Violation(f"a completion has {len(output.token_ids)} tokens, but max_response_tokens is {limit}")
        if int(output.token_ids.min()) < 0 or (size is not None and int(output.token_ids.max()) >= size):
            raise Violation(f"a completion has ids outside the vocabulary of {size}: {output.token_ids.tolist()}")
    probe.answers = answers
    lengths = [len(output.token_ids) for _, output in probe.sampled()]
    return f"{len(lengths)} completions of {min(lengths)} to {max(lengths)} tokens for {len(answers)} prompts"


async def _ends(probe: EngineProbe) -> str:
    first = [output for _, output in probe.sampled()]
    ends = _finished(first, probe.params)
    if not ends["stop"]:
        # The policy does not end its turns yet, so use its most common tokens as stop tokens.
        usual = Counter(token for output in first for token in output.token_ids.tolist())
        params = probe.params_with(stop_token_ids=tuple(token for token, _ in usual.most_common(MAX_STOPS)))
        for prompt in probe.prompts:
            ends += _finished(await probe.group(prompt, range(probe.samples), params), params)
    short = probe.params_with(max_response_tokens=1)
    for prompt in probe.prompts:
        ends += _finished(await probe.group(prompt, range(probe.samples), short), short)
    return ", ".join(f"{count} by {reason}" for reason, count in sorted(ends.items()))


def _finished(outputs: Sequence[TokenOutput], params: SamplingParams) -> Counter[str]:
    """Checks where completions end and why; counts the finish reasons."""
    ends: Counter[str] = Counter()
    limit = params.max_response_tokens
    for output in outputs:
        ids = output.token_ids.tolist()
        shown = f"completion {ids}, stop tokens {list(params.stop_token_ids)}, at most {limit} tokens"
        if not set(params.stop_token_ids).isdisjoint(ids[:-1]):
            raise Violation(f"the completion continues after a stop token: {shown}")
        if len(ids) > limit:
            raise Violation(f"the completion is too long: {shown}")
        has_stop = ids[-1] in params.stop_token_ids
        if not has_stop and len(ids) < limit:
            raise Violation(f"the completion ends before the limit, but without its stop token: {shown}")
        expected = FinishReason.STOP if has_stop else FinishReason.LENGTH
        if output.finish_reason is not expected:
            raise Violation(f"finish_reason is {output.finish_reason.value!r}, not {expected.value!r}: {shown}")
        ends[expected.value] += 1
    return ends


async def _logprobs(probe: EngineProbe) -> str:
    lowest = 0.0
    for _, output in probe.sampled():
        lowest = min(lowest, float(_checked_logprobs(output).min()))
    if lowest == 0:
        raise Violation("all log-probabilities are 0, so they cannot be those of the sampled tokens")
    return f"from {lowest:.3g}"


def _checked_logprobs(output: TokenOutput) -> Floats:
    if output.logprobs is None:
        raise Violation("a completion has no log-probabilities, but supports_token_in_token_out is True")
    logprobs = np.asarray(output.logprobs)
    if logprobs.shape != output.token_ids.shape:
        raise Violation(f"log-probabilities of shape {logprobs.shape} for {len(output.token_ids)} tokens")
    if not np.isfinite(logprobs).all() or logprobs.max() > HIGHEST_LOGPROB:
        raise Violation(f"log-probabilities must be finite and at most 0, got {logprobs.tolist()}")
    return logprobs


async def _greedy(probe: EngineProbe) -> str:
    probe.sampled()
    params = probe.params_with(temperature=0.0)
    for prompt in probe.prompts:
        outputs = [*await probe.group(prompt, (0, 1), params), await probe.single(prompt, 2, params)]
        for output in outputs:
            _checked_logprobs(output)
        _finished(outputs, params)
        if len({output.token_ids.tobytes() for output in outputs}) > 1:
            raise Violation(f"at temperature 0, one prompt has several completions: {_shown(outputs)}")
    return "one completion per prompt"


def _shown(outputs: Sequence[TokenOutput]) -> str:
    return ", ".join(str(output.token_ids.tolist()) for output in outputs)


async def _seeds(probe: EngineProbe) -> str:
    pairs = probe.sampled()
    if probe.deterministic:
        for prompt, before in zip(probe.prompts, probe.answers, strict=True):
            for first, second in zip(before, await probe.group(prompt, range(probe.samples)), strict=True):
                if not np.array_equal(first.token_ids, second.token_ids):
                    raise Violation(f"the same seed gives different tokens on a second call: {_shown([first, second])}")
            first, second = [await probe.single(prompt, 5) for _ in range(2)]
            if not np.array_equal(first.token_ids, second.token_ids):
                raise Violation(f"the same seed gives different tokens on a second call: {_shown([first, second])}")
    singles = await asyncio.gather(*(probe.single(probe.prompts[0], seed) for seed in range(probe.samples)))
    concluded = [_differ(outputs, "in one call") for outputs in probe.answers]
    if not any([*concluded, _differ(singles, "one by one")]):
        raise NotApplicable("the policy is too certain of its answers to judge whether seeds matter")
    different = len({output.token_ids.tobytes() for _, output in pairs})
    return f"{different} different among {len(pairs)}" + (", reproducible" if probe.deterministic else "")


def _differ(outputs: Sequence[TokenOutput], how: str) -> bool:
    """Returns whether completions of different seeds differ; False if they may be equal by chance."""
    if len({output.token_ids.tobytes() for output in outputs}) > 1:
        return True
    if (len(outputs) - 1) * float(_checked_logprobs(outputs[0]).sum()) > np.log(CHANCE):
        return False
    raise Violation(f"{len(outputs)} different seeds {how} all give {outputs[0].token_ids.tolist()}")


async def _groups(probe: EngineProbe) -> str:
    probe.sampled()
    sizes = (1, 3, 2 * probe.samples)
    for size in sizes:
        for output in await probe.group(probe.prompts[0], range(size)):
            _checked_logprobs(output)
    return f"{', '.join(map(str, sizes))} completions in one call"


async def _concurrency(probe: EngineProbe) -> str:
    probe.sampled()
    asked = []
    for place in range(max(probe.samples, 8)):
        limit = probe.params.max_response_tokens - place // 2 % probe.params.max_response_tokens
        params = probe.params_with(max_response_tokens=limit, temperature=float(place // len(probe.prompts) % 2))
        asked.append((probe.prompts[place % len(probe.prompts)], params))
    calls = (probe.single(prompt, seed, params) for seed, (prompt, params) in enumerate(asked))
    outputs = await asyncio.gather(*calls)
    for output, (_, params) in zip(outputs, asked, strict=True):
        _checked_logprobs(output)
        _finished([output], params)
    if probe.engine.computes_logprobs:  # finds completions that went to the wrong caller
        pairs = [(prompt, output) for (prompt, _), output in zip(asked, outputs, strict=True)]
        await _compare_scores(probe, pairs[: 2 * len(probe.prompts)])
    return f"{len(asked)} at once, each with its own limit"


async def _cancellation(probe: EngineProbe) -> str:
    probe.sampled()
    long = probe.params_with(max_response_tokens=4 * probe.params.max_response_tokens, stop_token_ids=())
    params, prompt = long.model_copy(update={"temperature": 0.0}), probe.prompts[0]
    expected = await probe.single(prompt, 0, params)
    began = time.monotonic()
    await probe.group(prompt, range(probe.samples), long)
    duration_seconds = time.monotonic() - began
    for turns, share in CANCELLED_AFTER:
        neighbour = asyncio.create_task(probe.single(prompt, 0, params))
        given_up = asyncio.ensure_future(
            probe.engine.get_token_outputs_from_token_input(prompt, sampling_params=long, seeds=range(probe.samples))
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.sleep(share * duration_seconds)
        given_up.cancel()
        done, _ = await asyncio.wait({given_up}, timeout=probe.request_timeout_seconds)
        if not done:
            raise Violation(f"a cancelled call did not end within {probe.request_timeout_seconds:g} s")
        if not given_up.cancelled() and given_up.exception() is not None:
            raise Violation(f"a cancelled call raised {given_up.exception()!r} instead of CancelledError")
        for output in (await neighbour, await probe.single(prompt, 0, params)):
            if not np.array_equal(output.token_ids, expected.token_ids):
                raise Violation(f"cancelling a call changes the completions of others: {_shown([expected, output])}")
    return "calls during and after a cancelled one are unaffected"


async def _outside(probe: EngineProbe) -> str:
    probe.sampled()
    params, prompt = probe.params_with(temperature=0.0), probe.prompts[0]
    expected = await probe.single(prompt, 0, params)
    outside = [CERTAINLY_OUTSIDE, *([] if probe.vocabulary_size is None else [probe.vocabulary_size])]
    for token in outside:
        neighbour = asyncio.create_task(probe.single(prompt, 0, params))
        bad = token_ids([*prompt.tolist(), token])
        try:
            output = await probe.single(bad, 0, params)
        except EngineError:
            pass
        else:
            raise Violation(
                f"a prompt with token id {token} must raise EngineError, but returned {output.token_ids.tolist()}"
            )
        finally:
            [beside] = await asyncio.gather(neighbour, return_exceptions=True)
        [after] = await asyncio.gather(probe.single(prompt, 0, params), return_exceptions=True)
        for other in (beside, after):
            if not isinstance(other, TokenOutput) or not np.array_equal(other.token_ids, expected.token_ids):
                raise Violation(f"rejecting a prompt changes the completions of others: {other!r}")
    return f"{', '.join(map(str, outside))} rejected"


async def _versions(probe: EngineProbe) -> str:
    version = probe.engine.weight_version
    for _, output in probe.sampled():
        newest = version if output.newest_weight_version is None else output.newest_weight_version
        if (output.weight_version, newest) != (version, version):
            raise Violation(
                f"completions have weight version {output.weight_version} to {newest}, but the engine's "
                f"weight_version is {version}"
            )
    return f"version {version}"


async def _validation(probe: EngineProbe) -> str:
    probe.sampled()
    prompt, greedy = probe.prompts[0], probe.params_with(temperature=0.0)
    expected = await probe.single(prompt, 0, greedy)
    before = await probe.group(prompt, range(probe.samples))
    output = await probe.single(prompt, 0, greedy, is_validation=True)
    if not np.array_equal(output.token_ids, expected.token_ids):
        raise Violation("is_validation changes the sampled tokens")
    after = await probe.group(prompt, range(probe.samples))
    again = await probe.single(prompt, 0, greedy)
    if not np.array_equal(again.token_ids, expected.token_ids):
        raise Violation("a call with is_validation changes the completions of later calls without it")
    _differ(after, "after a call with is_validation")
    if probe.deterministic and [o.token_ids.tolist() for o in after] != [o.token_ids.tolist() for o in before]:
        raise Violation("a call with is_validation changes the completions of later calls without it")
    return "affects its own call only"


async def _media(probe: EngineProbe) -> str:
    probe.sampled()
    if probe.takes_media:
        raise NotApplicable("it supports media")
    image = MediaChunk(sha256="0" * 64, kind="image", length_tokens=4)
    try:
        output = await probe.single([*probe.prompts[0].tolist(), image], 0)
    except (EngineError, ValueError) as error:
        if probe.engine.name not in str(error) or image.kind not in str(error):
            raise Violation(f"the error for media must name the engine and the kind of media, got: {error}") from error
        return str(error)
    raise Violation(
        f"without media support, a prompt with an image must raise, but returned {output.token_ids.tolist()}"
    )


async def _scores(probe: EngineProbe) -> str:
    pairs = probe.sampled()
    if not probe.engine.computes_logprobs:
        raise NotApplicable("computes_logprobs is False")
    prompt, chosen = probe.prompts[0], pairs[:: probe.samples]
    for params in (probe.params_with(temperature=0.0), probe.params_with(top_k=1)):
        chosen.append((prompt, await probe.single(prompt, 0, params)))
    gap = await _compare_scores(probe, chosen)
    prompt, output = chosen[0]
    end = (await probe.scores(np.concatenate([prompt, output.token_ids]), 1))[len(prompt) - 1 :]
    known = ~np.isnan(end)
    gap = max(gap, _gap(end[known], _checked_logprobs(output)[known], probe.logprob_tolerance))
    return f"{len(chosen)} completions, max difference from sampling {gap:.2g}"


async def _compare_scores(probe: EngineProbe, chosen: Sequence[tuple[TokenIds, TokenOutput]]) -> float:
    """Scores completions sampled at temperature 1 or 0; returns the largest difference from sampling."""
    gap, is_known = 0.0, False
    for prompt, output in chosen:
        scores = await probe.scores(np.concatenate([prompt, output.token_ids]), len(prompt))
        known = ~np.isnan(scores)
        is_known = is_known or bool(known.any())
        gap = max(gap, _gap(scores[known], _checked_logprobs(output)[known], probe.logprob_tolerance))
    if not is_known:
        raise Violation("compute_logprobs returned NaN for every token; set computes_logprobs = False")
    return gap


def _gap(scores: Floats, sampled: Floats, tolerance: float) -> float:
    gap = float(np.abs(scores - sampled).max(initial=0.0))
    if not gap <= tolerance:
        raise Violation(
            f"compute_logprobs returned {scores.tolist()} for tokens sampled with {sampled.tolist()}: {gap:.2g} apart, "
            f"limit {tolerance:g} (report log-probabilities before top_k and top_p)"
        )
    return gap


ENGINE_CHECKS: dict[str, Check[EngineProbe]] = {
    "tokens": _tokens,
    "ends": _ends,
    "log-probabilities": _logprobs,
    "greedy": _greedy,
    "seeds": _seeds,
    "groups": _groups,
    "concurrency": _concurrency,
    "cancellation": _cancellation,
    "vocabulary": _outside,
    "versions": _versions,
    "validation": _validation,
    "media": _media,
    "scores": _scores,
}
"""Checks by name; each takes an engine with prompts and returns its findings."""
