"""Tests that diagnostics cover a whole step, however it is split into passes."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm_core.algorithms.diagnostics import OffPolicyDiagnostics, token_ages
from rllm_core.types import TrainingSample

LOG_RHO = np.array([-0.1, 0.1, 0.8, 0.0])


def diagnosed(advantages: Any, ages: Any, **given: Any) -> dict[str, float]:
    diagnostics = OffPolicyDiagnostics()
    diagnostics.add(np.asarray(advantages), np.asarray(ages), **{key: np.asarray(of) for key, of in given.items()})
    return diagnostics.flush()


def test_golden_vector() -> None:
    metrics = diagnosed([1, 1, 1, 1], [0, 0, 0, 0], log_ratios=LOG_RHO)
    assert metrics == {
        "off_policy_log_ratio": pytest.approx(0.25, abs=1e-6),
        "off_policy_k3": pytest.approx(0.108887, abs=1e-6),
        "off_policy_chi_square": pytest.approx(0.998291, abs=1e-6),
        "off_policy_effective_share": pytest.approx(0.857325, abs=1e-6),
        "off_policy_perplexity_ratio": pytest.approx(np.exp(-0.2), abs=1e-6),
    }


def test_parts_are_by_sign_and_by_age() -> None:
    metrics = diagnosed(
        [1.0, -1.0, 2.0, -3.0, 1.0, 0.0],
        [0, 1, 2, 3, 9, 9],
        log_ratios=[0.0, 0.1, 0.2, -0.4, 0.5, 7.0],
        weights=[1.0, 0.0, 2.0, 0.5, 0.0, 9.0],
        clipped=[False, True, True, False, False, True],
    )
    assert {name: value for name, value in metrics.items() if "log_ratio" in name} == pytest.approx(
        {
            "off_policy_log_ratio": 1.2 / 5,
            "off_policy_log_ratio/age_0": 0.0,
            "off_policy_log_ratio/age_1": 0.1,
            "off_policy_log_ratio/age_2_3": 0.3,
            "off_policy_log_ratio/age_4_up": 0.5,
        }
    )
    assert {name: value for name, value in metrics.items() if "masked" in name} == pytest.approx(
        {
            "masked_share": 0.4,
            "masked_share/negative": 0.5,
            "masked_share/positive": 1 / 3,
            "masked_share/age_0": 0.0,
            "masked_share/age_1": 1.0,
            "masked_share/age_2_3": 0.0,
            "masked_share/age_4_up": 1.0,
        }
    )
    assert metrics["correction_weight_mean"] == pytest.approx(3.5 / 5)
    assert metrics["clipped_share"] == pytest.approx(0.4)
    assert metrics["clipped_share/negative"] == 0.5
    assert metrics["clipped_share/age_2_3"] == 0.5


def test_what_is_not_known_is_left_out() -> None:
    assert OffPolicyDiagnostics().flush() == {}
    assert diagnosed([0.0, 0.0], [0, 0], log_ratios=[1.0, 2.0]) == {}
    assert diagnosed([1.0], [0], log_ratios=[np.nan], weights=[1.0]) == {}
    assert diagnosed([1.0, -1.0], [0, 0], clipped=[True, False]) == {
        "clipped_share": 0.5,
        "clipped_share/negative": 0.0,
        "clipped_share/positive": 1.0,
    }
    partly = diagnosed([1.0, 1.0], [0, 0], log_ratios=[np.nan, 0.5], weights=[9.0, 0.0])
    assert (partly["off_policy_log_ratio"], partly["masked_share"]) == (0.5, 1.0)


def test_one_step_does_not_see_the_one_before() -> None:
    diagnostics = OffPolicyDiagnostics()
    for log_ratio in (0.5, 0.25):
        diagnostics.add(np.ones(3), np.zeros(3, np.int64), log_ratios=np.full(3, log_ratio))
        assert diagnostics.flush()["off_policy_log_ratio"] == log_ratio


TOKENS = st.lists(
    st.tuples(
        st.sampled_from([-1.5, -1.0, 0.0, 0.5]),
        st.integers(0, 6),
        st.floats(-30, 30) | st.just(float("nan")),
        st.sampled_from([0.0, 0.5, 2.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=40,
)


@settings(deadline=None)
@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 40)), order=st.randoms(use_true_random=False))
def test_cuts_and_order_change_nothing(tokens: list[Any], cuts: list[int], order: Any) -> None:
    def columns(rows: list[Any]) -> dict[str, Any]:
        names = ("advantages", "ages", "log_ratios", "weights", "clipped")
        return {name: np.array([row[place] for row in rows]) for place, name in enumerate(names)}

    shuffled = list(tokens)
    order.shuffle(shuffled)
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    diagnostics = OffPolicyDiagnostics()
    for start, stop in pairwise(bounds):
        part = columns(shuffled[start:stop])
        diagnostics.add(part.pop("advantages"), part.pop("ages"), **part)
    assert diagnostics.flush() == pytest.approx(diagnosed(**columns(tokens)), rel=1e-9, abs=1e-12)


def test_ages_are_those_of_each_turn() -> None:
    def sample(versions: tuple[int, ...], spans: tuple[tuple[int, int], ...]) -> TrainingSample:
        tokens = sum(stop - start for start, stop in spans)
        return TrainingSample(
            group_id=0,
            rollout_id="0",
            token_ids=np.arange(20),
            turn_spans=spans,
            logprobs=None,
            advantages=np.ones(tokens),
            weight_versions=versions,
        )

    samples = [sample((3, 5), ((1, 3), (4, 5))), sample((1,), ((2, 4),))]
    assert token_ages(samples, 5).tolist() == [2, 2, 0, 4, 4]


def test_every_name_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text(encoding="utf-8")
    _, _, section = page.partition("### Off-policy diagnostics\n")
    rows = set(re.findall(r"^\| `(\w+)` ", section.partition("\n## ")[0], re.M))
    found = diagnosed(
        [1, -1, 1, -1],
        [0, 1, 2, 4],
        log_ratios=LOG_RHO,
        weights=np.ones(4),
        clipped=np.ones(4, np.bool_),
    )
    assert {name.partition("/")[0] for name in found} == rows
    assert {name.partition("/")[2] for name in found} - {""} == set(re.findall(r"/((?:age|pos|neg)\w+)`", section))
