"""Tests that backends get the data for off-policy training, and that excluded samples are counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rllm_core.errors import ConfigError
from rllm_core.types import Episode, TerminationReason, TrainingSample
from rllm_devkit.scripted import ScriptedBackend, ScriptedWorkflow

AHEAD = ("training.staleness_threshold=2", "training.partial_rollout=true", "training.groups_per_forward_backward=2")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[TrainingSample]:
    """Collects the backend's samples; its log-probabilities are minus the step number."""
    samples: list[TrainingSample] = []
    original = ScriptedBackend.transform_to_backend_batch

    def transform(self: Any, batch: Any) -> Any:
        samples.extend(batch)
        return original(self, batch)

    async def compute(self: Any, batch: Any, policy: str = "current") -> Any:
        assert policy == "proximal"
        return [np.full(sample.sampled_tokens, -float(self.steps + 1), np.float32) for sample in batch]

    monkeypatch.setattr(ScriptedBackend, "transform_to_backend_batch", transform)
    monkeypatch.setattr(ScriptedBackend, "compute_logprobs", compute)
    monkeypatch.setattr(ScriptedBackend, "capability_overrides", {"policies": frozenset({"proximal"})})
    return samples


@pytest.mark.slow
def test_a_sample_says_who_sampled_it_and_what_the_policy_before_the_step_thinks(run_scripted: Any, seen: Any) -> None:
    run = run_scripted(*AHEAD, "algorithm.proximal_policy=forward")
    assert run.error is None
    assert len(seen) == 96
    assert {float(value) for sample in seen for value in sample.proximal_logprobs} == {-1.0, -2, -3, -4, -5, -6}
    assert all(sample.logprobs is not None and (sample.logprobs <= 0).all() for sample in seen)
    ages = {-float(sample.proximal_logprobs[0]) - 1 - min(sample.weight_versions) for sample in seen}
    assert max(ages) >= 1, "generation was ahead, and the samples say so"


@pytest.mark.slow
def test_nobody_computes_what_nobody_asked_for(run_scripted: Any, seen: Any) -> None:
    run_scripted(*AHEAD)
    assert {sample.proximal_logprobs is None for sample in seen} == {True}


def test_a_backend_that_cannot_compute_them_says_so_at_start(run_scripted: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(ScriptedBackend, "capability_overrides", {"policies": frozenset()})
    with pytest.raises(ConfigError, match=r"proximal_policy = 'forward' is not supported by .* supports: rollout"):
        run_scripted("algorithm.proximal_policy=forward")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [(), AHEAD])
def test_rollouts_that_ended_for_a_filtered_reason_are_neither_trained_nor_compared(
    run_scripted: Any, monkeypatch: pytest.MonkeyPatch, seen: list[TrainingSample], mode: tuple[str, ...]
) -> None:
    original = ScriptedWorkflow.run

    async def cut_off(self: Any, task: Any, completer: Any) -> Episode:
        episode = await original(self, task, completer)
        number = task.data["number"]
        if number == 1 or (number % 2 == 0 and completer.seed % 4 == 0):
            episode.termination_reason = TerminationReason.MAX_RESPONSE_TOKENS
        return episode

    monkeypatch.setattr(ScriptedWorkflow, "run", cut_off)
    run = run_scripted(*mode, "algorithm.filter_termination_reasons=['max_response_tokens_exceeded']")
    assert run.error is None
    filtered = run.summary["books_by_reason"]["filtered"]
    left_out = sum(event["left_out"] for event in run.lines("events") if event["event"] == "enqueue")
    assert left_out > 0
    assert len(seen) == run.summary["books"]["trained"]
    assert run.summary["books"]["trained"] + filtered["termination_reason"] >= 96
    whole = [event for event in run.lines("events") if event["event"] == "filter"]
    assert all(event["reason"] in ("termination_reason", "too_few_trajectories") for event in whole)
