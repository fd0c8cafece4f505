"""Tests corrections against hand-computed numbers and their common properties."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rllm_devkit.scripted_plugin
from rllm_core import hookimpl, providers
from rllm_core.algorithms.corrections import Correction, Corrections
from rllm_core.assembly.algorithm import Algorithm
from rllm_core.assembly.resolution import load_run_config, providers_of
from rllm_core.builtin.off_policy_corrections import (
    GeometricRejection,
    IcePop,
    Importance,
    K3Rejection,
    SequenceMIS,
    SequenceTIS,
    TokenTIS,
)
from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError, RunError
from rllm_core.plugins import PluginManager

LOG_RHO = np.array([-0.1, 0.1, 0.8, 0.0])
RHO = [0.904837, 1.105171, 2.225541, 1.0]
ONE = np.zeros(1, np.int64)
EVERY = [GeometricRejection, IcePop, Importance, K3Rejection, SequenceMIS, SequenceTIS, TokenTIS]


def weights(
    correction: type[Correction], log_ratios: Any = LOG_RHO, starts: Any = ONE, **options: float
) -> list[float]:
    return Corrections([correction(options)]).weights(np.asarray(log_ratios, np.float64), np.asarray(starts)).tolist()


@pytest.mark.parametrize(
    ("correction", "options", "expected"),
    [
        (TokenTIS, {}, [0.904837, 1.105171, 2.0, 1.0]),
        (TokenTIS, {"cap": 1.05}, [0.904837, 1.05, 1.05, 1.0]),
        (Importance, {}, RHO),
        (IcePop, {"high": 2.0}, [0.904837, 1.105171, 0.0, 1.0]),
        (IcePop, {"low": 0.95}, [0.0, 1.105171, 2.225541, 1.0]),
        (SequenceTIS, {}, [2.0] * 4),
        (SequenceTIS, {"cap": 5.0}, [2.225541] * 4),
        (SequenceMIS, {}, [2.225541] * 4),
        (SequenceMIS, {"high": 2.2}, [0.0] * 4),
        (GeometricRejection, {"high": 1.2214}, [0.0] * 4),  # the mean is 1.2214028
        (GeometricRejection, {"high": 1.2215}, [1.0] * 4),
        (K3Rejection, {"limit": 0.10888}, [0.0] * 4),  # the mean is 0.1088873
        (K3Rejection, {"limit": 0.10889}, [1.0] * 4),
    ],
)
def test_golden_vectors(correction: type[Correction], options: dict[str, float], expected: list[float]) -> None:
    assert weights(correction, **options) == pytest.approx(expected, abs=1e-6)


def test_sequences_are_apart() -> None:
    starts = [0, 1, 3]
    log_ratios = [0.5, 2.0, -1.9, -0.3, -0.2]
    assert weights(SequenceTIS, log_ratios, starts) == pytest.approx(
        [math.exp(0.5)] + 2 * [math.exp(0.1)] + 2 * [math.exp(-0.5)]
    )
    assert weights(SequenceMIS, log_ratios, starts, low=0.7) == pytest.approx(
        [math.exp(0.5)] + 2 * [math.exp(0.1)] + 2 * [0.0]
    )
    assert weights(GeometricRejection, log_ratios, starts, low=0.9, high=1.1) == [0, 1, 1, 0, 0]
    assert weights(K3Rejection, log_ratios, starts, limit=0.2) == [1, 0, 0, 1, 1]


CUT = st.lists(st.lists(st.floats(-25, 25), min_size=1, max_size=6), min_size=1, max_size=5)


@pytest.mark.parametrize("correction", EVERY)
@settings(deadline=None)
@given(sequences=CUT, order=st.randoms(use_true_random=False))
def test_a_sequence_is_worth_the_same_in_any_company(
    correction: type[Correction], sequences: list[list[float]], order: Any
) -> None:
    alone = [weights(correction, sequence) for sequence in sequences]
    places = list(range(len(sequences)))
    order.shuffle(places)
    lengths = [len(sequences[place]) for place in places]
    starts = np.cumsum([0, *lengths[:-1]])
    together = weights(correction, np.concatenate([sequences[place] for place in places]), starts)
    assert together == pytest.approx(np.concatenate([alone[place] for place in places]).tolist(), rel=1e-12)


@pytest.mark.parametrize("correction", EVERY)
def test_on_policy_nothing_is_corrected(correction: type[Correction]) -> None:
    assert weights(correction, np.zeros(5), [0, 2]) == [1.0] * 5


@pytest.mark.parametrize("correction", EVERY)
def test_abandoned_tokens_stay_finite(correction: type[Correction]) -> None:
    assert np.isfinite(weights(correction, np.array([-900.0, 900.0, 900.0]))).all()


def test_masks_combine_with_weights() -> None:
    both = Corrections([TokenTIS(), GeometricRejection({"low": 0.9, "high": 1.1})])
    found = both.weights(np.array([0.05, 0.02, 3.0, 3.0]), np.array([0, 2]))
    assert found.tolist() == pytest.approx([math.exp(0.05), math.exp(0.02), 0, 0])


class Halving(Correction):
    is_mask = True

    def __call__(self, log_ratios: Any, starts: Any) -> Any:
        return np.where(log_ratios > 0.5, 0.5, 1.0)


def test_a_mask_that_weighs_is_found_out() -> None:
    with pytest.raises(RunError, match="Halving declares is_mask, so it must return 0 or 1 per token"):
        Corrections([Halving()]).weights(LOG_RHO, ONE)


@pytest.mark.parametrize(
    ("correction", "options"),
    [(TokenTIS, {"cap": 0.5}), (IcePop, {"low": 1.5}), (SequenceMIS, {"high": 0.9}), (K3Rejection, {"limit": 0})],
)
def test_bounds_that_would_mask_what_is_on_policy_are_refused(
    correction: type[Correction], options: dict[str, float]
) -> None:
    with pytest.raises(ConfigError):
        correction(options)


# --------------------------------------------------------------------------------------------------------------------
# From the run file


class Plugin:
    @hookimpl
    def corrections(self) -> list[providers.CorrectionProvider]:
        return [providers.CorrectionProvider(name="halving", load="halving:HalfOfAll", summary="Half of everything.")]


class HalfOfAll(Correction):
    def __call__(self, log_ratios: Any, starts: Any) -> Any:
        return np.full(len(log_ratios), 0.5)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    monkeypatch.setitem(sys.modules, "halving", sys.modules[__name__])  # pytest's name cannot be imported
    manager = PluginManager.from_environment(no_plugins=True)
    manager.register(rllm_devkit.scripted_plugin, "testing")
    manager.register(Plugin(), "halving")
    return manager


def configured(plugins: PluginManager, *overrides: str) -> RunConfig:
    return load_run_config("say_yes", plugins, overrides=overrides, backend="scripted")


def chosen(plugins: PluginManager, *overrides: str) -> Corrections:
    return Algorithm.of(providers_of(configured(plugins, *overrides), plugins)).corrections


@pytest.mark.parametrize("names", ["'halving'", "'token_tis','k3_rejection'", "'geometric_rejection','k3_rejection'"])
def test_names_of_the_run_file(plugins: PluginManager, names: str) -> None:
    found = chosen(plugins, "algorithm.proximal_policy=forward", f"algorithm.corrections=[{names}]")
    registered = plugins.providers(providers.CorrectionProvider)
    assert [registered[name.strip("'")].record.load.partition(":")[2] for name in names.split(",")] == [
        type(one).__name__ for one in found.corrections
    ]


def test_options_reach_the_correction_that_they_name(plugins: PluginManager) -> None:
    found = chosen(
        plugins,
        "algorithm.proximal_policy=forward",
        "algorithm.corrections=['token_tis']",
        "algorithm.correction_options.token_tis.cap=1.5",
    )
    assert found.weights(LOG_RHO, ONE).max() == 1.5


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (
            ["algorithm.corrections=['token_tis']"],
            r"needs algorithm.proximal_policy = 'forward' or 'interpolated'.*twice",
        ),
        (
            ["algorithm.proximal_policy=forward", "algorithm.corrections=['token_tis','icepop']"],
            "counts one ratio twice: use only one of icepop, token_tis, plus any masks",
        ),
        (["algorithm.proximal_policy=forward", "algorithm.corrections=['halving','importance']"], "twice"),
        (["algorithm.proximal_policy=forward", "algorithm.corrections=['k3_rejection','k3_rejection']"], "twice"),
        (
            [
                "algorithm.proximal_policy=forward",
                "algorithm.corrections=['token_tis']",
                "algorithm.correction_options.token_tis.cpa=1.5",
            ],
            "did you mean 'algorithm.correction_options.token_tis.cap'",
        ),
    ],
)
def test_double_counting_and_typos_are_errors(plugins: PluginManager, overrides: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        chosen(plugins, *overrides)
