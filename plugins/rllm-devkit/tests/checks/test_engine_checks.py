"""Tests of the public engine checks: compliant engines pass, and each check fails a noncompliant one."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from bigrams import VOCABULARY, BigramEngine
from faithful import CarefulScriptedEngine
from noncompliant_engines import HANGING, LIMIT_SECONDS, NONCOMPLIANT, Hanging

from rllm_core.engine import EngineBusy, RolloutEngine
from rllm_core.types import TokenOutput
from rllm_devkit.checks import CheckResult, check_engine
from rllm_devkit.checks.engines import ENGINE_CHECKS

# Their last tokens differ, so the bigrams continue differently.
PROMPTS = ([256, 10, 70], [256, 10, 71, 72])


def results(engine: RolloutEngine, **options: Any) -> list[CheckResult]:
    known = {"prompts": PROMPTS, "vocabulary_size": VOCABULARY, "deterministic": True}
    return asyncio.run(check_engine(engine, **{**known, **options}))


def outcomes(engine: RolloutEngine, **options: Any) -> dict[str, str]:
    return {result.name: result.outcome for result in results(engine, **options)}


def failures(engine: RolloutEngine, **options: Any) -> dict[str, str]:
    return {result.name: result.detail for result in results(engine, **options) if result.outcome == "failed"}


@pytest.mark.parametrize("engine", [BigramEngine(), CarefulScriptedEngine()], ids=lambda engine: engine.name)
@pytest.mark.parametrize("options", [{}, {"deterministic": False}, {"samples": 4}, {"vocabulary_size": None}], ids=str)
def test_honest_engines_pass(engine: RolloutEngine, options: dict[str, Any]) -> None:
    assert failures(engine, prompts=(), **options) == {}
    assert set(outcomes(engine, prompts=(), **options).values()) == {"passed"}


def test_results_tell_what_was_seen() -> None:
    found = {result.name: result for result in results(BigramEngine())}
    assert list(found) == list(ENGINE_CHECKS)
    assert found["groups"].detail == "1, 3, 32 completions in one call"
    assert "by stop" in found["ends"].detail
    assert "by length" in found["ends"].detail
    assert "takes text only" in found["media"].detail


def test_an_engine_without_a_parser_needs_prompts() -> None:
    engine = BigramEngine()
    engine.parser = None
    assert failures(engine) == {}
    with pytest.raises(ValueError, match="needs prompts"):
        results(engine, prompts=())


def test_what_does_not_apply_is_skipped() -> None:
    class WithoutScores(BigramEngine):
        computes_logprobs = False

    class WithMessagesOnly(BigramEngine):
        supports_token_in_token_out = False

    assert outcomes(WithoutScores())["scores"] == "skipped"
    assert outcomes(BigramEngine(), takes_media=True)["media"] == "skipped"
    assert set(outcomes(WithMessagesOnly()).values()) == {"skipped"}
    sure = BigramEngine(np.where(np.arange(VOCABULARY) == 65, 100.0, 0.0) * np.ones((VOCABULARY, 1)))
    assert outcomes(sure)["seeds"] == "skipped"


@pytest.mark.slow
def test_a_busy_engine_is_asked_again() -> None:
    class Busy(BigramEngine):
        asked = 0

        async def get_token_output_from_token_input(self, *arguments: Any, **more: Any) -> TokenOutput:
            self.asked += 1
            if self.asked in (3, 40):
                raise EngineBusy("429")
            return await super().get_token_output_from_token_input(*arguments, **more)

    found = asyncio.run(check_engine(Busy(), prompts=PROMPTS, request_timeout_seconds=5))
    assert {result.outcome for result in found} == {"passed"}


def test_a_cancellation_by_the_caller_is_one() -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(check_engine(Hanging(), prompts=PROMPTS))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noncompliant", "check", "words"), NONCOMPLIANT, ids=lambda value: getattr(value, "__name__", "")
)
def test_an_engine_that_breaks_a_rule_is_caught(noncompliant: type[BigramEngine], check: str, words: str) -> None:
    found = failures(noncompliant(), **{"request_timeout_seconds": LIMIT_SECONDS} if noncompliant in HANGING else {})
    assert check in found, found
    assert words in found[check]


def test_every_check_has_caught_somebody() -> None:
    assert {check for _, check, _ in NONCOMPLIANT} == set(ENGINE_CHECKS)
