"""Tests of the tracker: contract and file contents."""

from __future__ import annotations

import csv
from pathlib import Path

from rllm_core.config import RunConfig
from rllm_devkit.contracts import TrackerContract

from rllm_placeholder import tracker


def recorded(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Reads ``(step, value)`` pairs by metric name, in logging order."""
    found: dict[str, list[tuple[int, float]]] = {}
    with (run_dir / tracker.FILE).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["metric"], []).append((int(row["step"]), float(row["value"])))
    return found


class TestContract(TrackerContract):
    """Runs each contract check as a test. To check other settings, add ``overrides = ("section.key=value",)``."""

    name = "placeholder"
    local = True  # it writes only to the run folder
    read = staticmethod(recorded)


def written(run_dir: Path, config: tracker.PlaceholderConfig | None = None) -> list[str]:
    tested = tracker.PlaceholderTracker(config)
    tested.start(RunConfig(workflow="any"), str(run_dir))
    tested.log(1, {"reward_mean": 0.25, "groups": 16.0})
    tested.finish("completed")
    return (run_dir / tracker.FILE).read_text(encoding="utf-8").splitlines()


def test_every_number_is_a_line(tmp_path: Path) -> None:
    assert written(tmp_path) == ["step,metric,value", "1,reward_mean,0.25", "1,groups,16.0"]


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    lines = written(tmp_path)
    assert written(tmp_path) == lines + lines[1:]


def test_only_what_was_asked_for_is_written(tmp_path: Path) -> None:
    chosen = tracker.PlaceholderConfig(metrics=("groups", "loss"))
    assert written(tmp_path, chosen) == ["step,metric,value", "1,groups,16.0"]
