"""Tests that child processes of a run see its plugins: versions, state and records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rllm_core.plugins.settings import Settings

DRIVER = Path(__file__).with_name("driver_and_workers.py")
PACKAGES = ("rllm-good", "rllm-rival", "rllm-broken", "rllm-twin-a", "rllm-twin-b")


@pytest.fixture
def see(installed: Callable[..., list[str]], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Provides ``see(RLLM_PLUGINS="good")``, which returns the driver's and the workers' views."""

    def run(**variables: str) -> dict[str, Any]:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("RLLM_")}
        paths = [*installed(*PACKAGES), *filter(None, [environ.get("PYTHONPATH")])]
        environ |= {"PYTHONPATH": os.pathsep.join(paths), "RLLM_CONFIG_DIR": str(tmp_path), **variables}
        command = [sys.executable, DRIVER]
        done = subprocess.run(command, env=environ, cwd=tmp_path, check=True, capture_output=True, text=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


def states(found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {row["package"]: (row["version"], row["status"]) for row in found["plugins"]}


EVERYTHING = {
    "rllm-good": ("1.2", "loaded"),
    "rllm-rival": ("4.0", "loaded"),
    "rllm-broken": ("0.3", "broken"),
    "rllm-twin-a": ("1.0", "conflict"),
    "rllm-twin-b": ("2.0", "conflict"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "others"),
    [
        ({}, {}),
        ({"RLLM_PLUGINS": "good"}, dict.fromkeys(EVERYTHING.keys() - {"rllm-good"}, "disabled")),
        ({"RLLM_PLUGINS": ""}, dict.fromkeys(EVERYTHING, "disabled")),
        ({"RLLM_NO_PLUGINS": "rival,broken"}, dict.fromkeys(("rllm-rival", "rllm-broken"), "disabled")),
        ({"RLLM_NO_PLUGINS": "*"}, dict.fromkeys(EVERYTHING, "disabled")),
        (
            {"RLLM_NO_PLUGINS": "rllm-twin-a/twin"},
            {"rllm-twin-a": "disabled", "rllm-twin-b": "loaded"},
        ),
    ],
    ids=["all", "one", "none", "without-two", "without-any", "without-a-twin"],
)
def test_workers_see_what_the_driver_sees(
    see: Callable[..., dict[str, Any]], variables: dict[str, str], others: dict[str, str]
) -> None:
    found = see(**variables)
    expected = EVERYTHING | {package: (EVERYTHING[package][0], status) for package, status in others.items()}
    assert {name: state for name, state in states(found["driver"]).items() if name in EVERYTHING} == expected
    assert ("backend good" in found["driver"]["records"]) is (
        expected["rllm-good"][1] == "loaded" and expected["rllm-rival"][1] != "loaded"
    )
    assert found["spawned"] == found["driver"]
    assert found["started"] == found["driver"]


def test_what_is_disabled_for_all_runs_is_disabled_in_workers(
    see: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "plugins.toml").write_text('disabled = ["rival"]\n', encoding="utf-8")
    found = see()
    assert states(found["driver"])["rllm-rival"] == ("4.0", "disabled")
    assert found["spawned"] == found["started"] == found["driver"]


def test_the_variable_adds_to_what_a_caller_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("RLLM_NO_PLUGINS", "a, b")
    assert Settings.from_environment().blocked == {"a", "b"}
    assert Settings.from_environment(no_plugins=["c"]).blocked == {"a", "b", "c"}
    assert Settings.from_environment(no_plugins=True).blocked is True
    monkeypatch.setenv("RLLM_NO_PLUGINS", " ")
    assert Settings.from_environment().blocked is False
