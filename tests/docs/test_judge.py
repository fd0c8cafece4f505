"""Tests that the picture of the judges is drawn from recorded trials, and shows what the page says."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from statistics import fmean
from typing import Any

import judged_curves
import pytest
from pages import ROOT, Page

PAGE = Page(ROOT / "docs" / "judge.md")


def after(judge: str) -> dict[int, float]:
    return {row["seed"]: row["solved_after"] for row in judged_curves.records() if row["judge"] == judge}


def mean_of(judge: str, metric: str) -> float:
    return fmean(row[metric] for row in judged_curves.records() if row["judge"] == judge)


def test_the_picture_is_drawn_from_its_records() -> None:
    text = judged_curves.PICTURE.read_text(encoding="utf-8")
    assert judged_curves.svg(judged_curves.records()) == text, "run make docs-reference"
    assert "(images/judged.svg)" in PAGE.text
    assert ElementTree.fromstring(text).find("{http://www.w3.org/2000/svg}title") is not None


def test_records_are_made_of_rows() -> None:
    row: dict[str, Any] = {"kind": "training", "judge": "none", "seed": 1, "solved_after": 1.0, "agreement": None}
    row |= {"order_effect": None, "solved": [0.0] * 5 + [1.0] * 5 + [0.5] * 4, "books": {}}
    [found] = judged_curves.records_of([{"kind": "conditions"}, row])
    assert found["solved"] == [0.5, 0.5]
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(("judge", "share"), [("wrong", 0.95), ("first_twice", 0.9)])
def test_a_judge_that_errs_teaches_nearly_as_much_as_true_rewards(judge: str, share: float) -> None:
    own, judged = after("none"), after(judge)
    assert len(judged) >= 3
    assert all(judged[seed] >= share * own[seed] for seed in judged)


def test_the_metrics_name_the_judge_that_prefers_a_place() -> None:
    assert mean_of("first_twice", "agreement") < 0.5
    assert mean_of("first_twice", "order_effect") > 0.2
