"""Tests that a step's metrics include ratios and corrections."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from rllm_core.types import TrainingSample
from rllm_devkit.scripted import ScriptedBackend

AHEAD = ("training.staleness_threshold=2", "training.partial_rollout=true", "training.groups_per_forward_backward=2")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[TrainingSample]]:
    """Collects the backend's samples by step; its proximal policy is less confident in each token than the sampler."""
    samples: dict[int, list[TrainingSample]] = defaultdict(list)
    original = ScriptedBackend.transform_to_backend_batch

    def transform(self: Any, batch: Any) -> Any:
        samples[self.steps + 1].extend(batch)
        return original(self, batch)

    async def compute(self: Any, batch: Any, policy: str = "current") -> Any:
        return [(sample.logprobs - 0.1 * (self.steps + 1)).astype(np.float32) for sample in batch]

    monkeypatch.setattr(ScriptedBackend, "transform_to_backend_batch", transform)
    monkeypatch.setattr(ScriptedBackend, "compute_logprobs", compute)
    monkeypatch.setattr(ScriptedBackend, "capability_overrides", {"policies": frozenset({"proximal"})})
    return samples


@pytest.mark.slow
@pytest.mark.parametrize("mode", [(), AHEAD], ids=["synchronous", "asynchronous"])
def test_corrections_of_the_core_are_in_the_metrics(run_scripted: Any, seen: Any, mode: tuple[str, ...]) -> None:
    run = run_scripted(*mode, "algorithm.proximal_policy=forward", "algorithm.corrections=['token_tis']")
    assert run.error is None
    compared = 0
    for row in run.lines("metrics"):
        if not any(sample.advantages.any() for sample in seen[row["step"]]):
            assert "off_policy_log_ratio" not in row
            continue
        compared += 1
        assert row["off_policy_log_ratio"] == pytest.approx(0.1 * row["step"], rel=1e-4)
        assert row["correction_weight_mean"] == pytest.approx(np.exp(-0.1 * row["step"]), rel=1e-4)
        assert row["off_policy_effective_share"] == pytest.approx(1, rel=1e-4)
        assert row["masked_share"] == 0
        assert ("masked_share/age_1" in row or "masked_share/age_2_3" in row) == (row["staleness_max"] > 0)
    assert compared > 0


@pytest.mark.slow
def test_nothing_is_said_of_what_is_not_known(run_scripted: Any, seen: Any) -> None:
    run = run_scripted(*AHEAD)
    assert not [name for row in run.lines("metrics") for name in row if name.startswith(("off_policy", "masked"))]
