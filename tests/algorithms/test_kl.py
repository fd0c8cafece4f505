"""Tests the KL divergence from the reference: its estimates, and the checks of its settings before a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rllm_devkit.scripted_plugin
from rllm_core.algorithms.kl import kl_estimate
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.plugins import PluginManager
from rllm_devkit.scripted import ScriptedBackend


def distribution(seed: int) -> Any:
    logits = np.random.default_rng(seed).normal(size=9)
    return logits - np.log(np.exp(logits).sum())


@pytest.mark.parametrize(("estimator", "is_unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_estimates_average_to_the_divergence(estimator: Any, is_unbiased: bool) -> None:
    policy, reference = distribution(0), distribution(1)
    exact = float((np.exp(policy) * (policy - reference)).sum())
    average = float((np.exp(policy) * kl_estimate(policy, reference, estimator)).sum())
    assert (average == pytest.approx(exact, rel=1e-12)) == is_unbiased
    assert average == pytest.approx(exact, rel=0.5)


def test_k3_is_never_negative_and_exact_where_policies_are_close() -> None:
    differences = np.array([-19.0, -1.0, -1e-9, 0.0, 1e-9, 1.0, 500.0])
    found = kl_estimate(np.zeros(7), differences, "k3")
    assert (found >= 0).all()
    assert np.isfinite(found).all()
    assert found[2] < 1e-15


@pytest.mark.parametrize(
    ("settings", "is_noted"),
    [
        (("estimator=k1",), True),
        (("estimator=k3",), False),
        (("estimator=k1", "place=reward"), False),
        (("estimator=k1", "coefficient=0"), False),
    ],
)
def test_k1_in_the_loss_is_noted(monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], is_noted: bool) -> None:
    able = {"kl_loss": True, "policies": frozenset({"current", "reference"})}
    monkeypatch.setattr(ScriptedBackend, "capability_overrides", able)
    plugins = PluginManager.from_environment(no_plugins=True)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    overrides = ["algorithm.kl.coefficient=0.1", *(f"algorithm.kl.{setting}" for setting in settings)]
    config = load_run_config("say_yes", plugins, overrides=overrides, backend="scripted")
    notes = assemble(config, plugins).notes
    assert any("gradient of zero on average" in note for note in notes) == is_noted
