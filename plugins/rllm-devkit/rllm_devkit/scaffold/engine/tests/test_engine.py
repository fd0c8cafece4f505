"""Tests of the engine: contract and distribution of tokens."""

from __future__ import annotations

import asyncio

import numpy as np
from rllm_core.types import SamplingParams, TokenOutput, token_ids
from rllm_devkit.contracts import EngineContract

from rllm_placeholder.engine import (
    PlaceholderConfig,
    PlaceholderEngine,
    log_softmax,
)
from rllm_placeholder.parser import PlaceholderParser

PROMPT = token_ids(list(b"ab"))


class TestContract(EngineContract):
    """Runs each contract check as a test."""

    name = "placeholder"


def answers(engine: PlaceholderEngine, params: SamplingParams, count: int) -> list[TokenOutput]:
    return asyncio.run(engine.get_token_outputs_from_token_input(PROMPT, sampling_params=params, seeds=range(count)))


def test_tokens_come_as_often_as_they_should() -> None:
    engine = PlaceholderEngine(PlaceholderParser())
    drawn = [int(output.token_ids[0]) for output in answers(engine, SamplingParams(max_response_tokens=1), 2000)]
    expected = np.exp(log_softmax(engine.logits[PROMPT[-1]]))
    found = np.bincount(drawn, minlength=len(expected)) / len(drawn)
    assert np.abs(found - expected).max() < 0.04


def test_the_section_changes_the_table() -> None:
    [stop, *_] = PlaceholderParser().get_stop_token_ids()
    for bonus, is_likeliest in ((50.0, True), (-50.0, False)):
        config = PlaceholderConfig(stop_bonus=bonus)
        logits = PlaceholderEngine(PlaceholderParser(), config).logits[PROMPT[-1]]
        assert (logits.argmax() == stop) == is_likeliest


def test_unlikely_tokens_are_cut() -> None:
    engine = PlaceholderEngine(PlaceholderParser())
    likeliest = np.argsort(-engine.logits[PROMPT[-1]])
    for cut, kept in (({"top_k": 3}, 3), ({"top_p": 1e-9}, 1)):
        params = SamplingParams(max_response_tokens=1).model_copy(update=cut)
        first = {int(output.token_ids[0]) for output in answers(engine, params, 200)}
        assert first == set(likeliest[:kept].tolist())
