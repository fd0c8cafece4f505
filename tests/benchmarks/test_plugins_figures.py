"""Tests that figures of the plugins benchmark are functions of its raw trials. Nothing is timed here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plugins, trials


def command(name: str, side: str, trial: int, wall: float, cpu: float = 1.0) -> dict[str, Any]:
    seconds = {"wall_seconds": wall, "cpu_seconds": cpu}
    return {"kind": "command", "command": name, "side": side, "trial": trial, **seconds}


def helped(side: str, trial: int, wall: float) -> dict[str, Any]:
    return {"kind": "help", "side": side, "trial": trial, "wall_seconds": wall, "cpu_seconds": wall / 2, "modules": 9}


def rows() -> list[dict[str, Any]]:
    found = []
    for trial, slow in enumerate((1.0, 10.0, 1.0)):  # the machine was slow during the second trial
        found += [command("plugins", "few", trial, 0.2 * slow), command("plugins", "many", trial, 0.3 * slow, cpu=1.25)]
        found += [command("plugins", "few_of_many", trial, 0.24 * slow)]
        found += [command("--help", side, trial, 0.5 * slow) for side in ("few", "few_of_many", "many")]
        found += [helped("dependencies", trial, slow), helped("help", trial, 1.5 * slow)]
    return found


def test_many_are_compared_with_few_trial_by_trial() -> None:
    found = plugins.figures(rows())
    assert (found["many_over_few"], found["many_over_few_cpu"]) == (1.5, 1.25)
    assert found["many_over_few_plugins"] == 1.25
    assert (found["plugins_few_ms"], found["plugins_many_ms"]) == (200.0, 300.0)
    assert found["help_many_over_few"] == 1.0
    assert found["help_over_dependencies"] == found["help_over_dependencies_cpu"] == 1.5


def test_a_trial_that_only_one_side_finished_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        plugins.figures([row for row in rows() if row.get("trial") != 2 or row.get("side") != "many"])


@pytest.mark.slow
def test_the_environments_hold_what_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "raw_path", lambda name: tmp_path / name / "raw.jsonl")
    plugins.main(["--trials", "1"])
    written = trials.read_rows(tmp_path / "plugins" / "raw.jsonl")
    sizes = {row["side"]: (row["distributions"], row["plugins"]) for row in trials.of_kind(written, "environment")}
    few, _ = sizes["few"]
    assert sizes == {
        "few": (few, plugins.FEW_PLUGINS),
        "few_of_many": (plugins.MANY_DISTRIBUTIONS, plugins.FEW_PLUGINS),
        "many": (plugins.MANY_DISTRIBUTIONS, plugins.MANY_PLUGINS),
    }
    assert few < plugins.MANY_DISTRIBUTIONS / 10
    assert json.dumps(plugins.figures(written))
