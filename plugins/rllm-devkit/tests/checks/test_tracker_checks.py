"""Tests of the public tracker checks: a compliant tracker passes, and each check fails a noncompliant one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from noncompliant_trackers import LIMIT_SECONDS, NONCOMPLIANT, Notebook, OneAtATime, WithTables, WritingEarly, read

from rllm_core.tracker import Tracker
from rllm_devkit.checks import check_tracker
from rllm_devkit.checks.trackers import TRACKER_CHECKS

NEED_NO_READER = {"picky", "one status", "needing metrics", "refusing", "locking"}


def failures(make: Any, folder: Path, **options: Any) -> dict[str, str]:
    known = {"read": read, "local": True, "deadline_seconds": LIMIT_SECONDS}
    results = check_tracker(make, folder, **{**known, **options})
    assert [result.name for result in results] == list(TRACKER_CHECKS)
    return {result.name: result.detail for result in results if result.outcome == "failed"}


@pytest.mark.parametrize(("tracker", "skipped"), [(Notebook, {"tables"}), (WithTables, set())])
def test_an_honest_tracker_passes(tracker: type[Tracker], skipped: set[str], tmp_path: Path) -> None:
    results = check_tracker(tracker, tmp_path / "new", read=read, local=True)
    assert {result.name: result.detail for result in results if result.outcome == "failed"} == {}
    assert {result.name for result in results if result.outcome == "skipped"} == skipped
    details = {result.name: result.detail for result in results}
    assert "all 4 metrics arrived" in details["arrival"]
    assert "recorded in the same run" in details["resume"]


def test_a_tracker_may_refuse_a_second_run_in_one_process(tmp_path: Path) -> None:
    details = {result.name: result for result in check_tracker(OneAtATime, tmp_path, read=read)}
    assert [result for result in details.values() if result.outcome == "failed"] == []
    assert details["side by side"].detail == "it rejects a second run in one process"


def test_without_a_reader_and_a_promise_less_is_checked(tmp_path: Path) -> None:
    outcomes = {result.name: result.outcome for result in check_tracker(Notebook, tmp_path)}
    assert {name for name, outcome in outcomes.items() if outcome == "skipped"} == {"locality", "tables"}
    assert "failed" not in outcomes.values()


@pytest.mark.parametrize("lie", NONCOMPLIANT)
def test_who_breaks_a_rule_is_caught(lie: str, tmp_path: Path) -> None:
    make, check, detail = NONCOMPLIANT[lie]
    WritingEarly.folder = tmp_path / "runs"
    found = failures(make, tmp_path / "runs")
    assert detail in found[check]


@pytest.mark.parametrize("lie", sorted(NEED_NO_READER))
def test_who_raises_is_caught_without_a_reader(lie: str, tmp_path: Path) -> None:
    make, check, detail = NONCOMPLIANT[lie]
    found = failures(make, tmp_path, read=None)
    assert detail in found[check]


def test_every_check_has_somebody_who_fails_it() -> None:
    assert {check for _, check, _ in NONCOMPLIANT.values()} == set(TRACKER_CHECKS)


def test_one_object_for_two_runs_is_caught(tmp_path: Path) -> None:
    one: Tracker = Notebook()
    assert "the same object" in failures(lambda: one, tmp_path)["construction"]
