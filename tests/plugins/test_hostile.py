"""Tests that listing and training keep working next to every hostile plugin."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_site import CONTROL, HOSTILE, beside, distribution, training

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def testing_plugin(tmp_path: Path) -> str:
    """Folder with one distribution: the core's test backend, engine and workflow."""
    return distribution(tmp_path / "testing", "rllm-testing", "1.0", "testing = rllm_devkit.scripted_plugin")


def rows(run: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert run.returncode == 0, run.stderr
    return {row["name"]: row for row in json.loads(run.stdout) if row["package"] == "rllm-hostile"}


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


# --------------------------------------------------------------------------------------------------------------------
# The listing


def test_the_listing_imports_none_of_them(rllm_core: Run) -> None:
    found = rows(rllm_core("plugins", "--json", packages=HOSTILE))
    assert {row["status"] for row in found.values()} == {"available"}
    assert len(found) == 16


@pytest.mark.slow
def test_their_health_is_told_from_children_that_they_cannot_leave(rllm_core: Run) -> None:
    """Nothing these plugins do reaches the calling process or outlives its children."""
    run = rllm_core("plugins", "--load", "--json", "--deadline-seconds", "15", packages=HOSTILE)
    found = rows(run)
    broken = {name: row["error"] for name, row in found.items() if row["status"] == "broken"}
    assert {name for name, row in found.items() if row["status"] == "loaded"} == found.keys() - broken.keys()
    assert broken["endless-hook"].startswith("its import did not end within 15 s")
    assert "SystemExit: from a hook" in broken["exits-in-hook"]
    assert "'../../etc/passwd:Anything' is not of the form" in broken["climbs"]
    assert {"huge-error", "mute-error", "colourful-error"} <= broken.keys()
    assert {
        "at-exit",
        "closes",
        "leaves-behind",
        "signals",
        "surroundings",
        "threads",
        "writes",
    } & broken.keys() == set()


def test_what_they_leave_behind_ends_with_the_child(rllm_core: Run, tmp_path: Path) -> None:
    told = tmp_path / "left"
    run = rllm_core(
        "plugins", "--load", "--json", packages=HOSTILE, RLLM_PLUGINS="leaves-behind", RLLM_TEST_LEFT=str(told)
    )
    assert rows(run)["leaves-behind"]["status"] == "loaded"
    left = int(told.read_text(encoding="utf-8"))
    deadline = time.monotonic() + 300
    while is_running(left) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(left)


# --------------------------------------------------------------------------------------------------------------------
# Training something else


@pytest.mark.slow
@pytest.mark.parametrize("name", ["climbs", "elsewhere", "exits-in-hook", "signals"])
def test_something_else_trains_beside_them(
    rllm_core: Run, installed: Callable[..., list[str]], testing_plugin: str, tmp_path: Path, name: str
) -> None:
    path = beside(installed, testing_plugin)
    run = rllm_core(*training("say_yes", tmp_path / "run"), PYTHONPATH=path, RLLM_PLUGINS=f"testing,good,{name}")
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["status"] == "completed"


@pytest.mark.slow
def test_a_plugin_that_takes_a_name_of_the_core_is_named_and_left_out_in_words(
    rllm_core: Run, installed: Callable[..., list[str]], testing_plugin: str, tmp_path: Path
) -> None:
    path, only = beside(installed, testing_plugin), {"RLLM_PLUGINS": "testing,takes-core"}
    refused = rllm_core(*training("say_yes", tmp_path / "run"), PYTHONPATH=path, **only)
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()
    assert "provided by rllm-core" in line
    assert "and rllm-hostile 6.6 (plugin 'takes-core'); choose 'rllm-core/grpo' or 'rllm-hostile/grpo'" in line
    chosen = (*training("say_yes", tmp_path / "run"), "-o", "algorithm.name=rllm-core/grpo")
    assert rllm_core(*chosen, PYTHONPATH=path, **only).returncode == 0


@pytest.mark.parametrize(
    ("workflow", "plugin", "problem"),
    [
        ("dots", "elsewhere", "cannot be loaded from rllm_hostile..records:Anything: ModuleNotFoundError"),
        (
            "climbs",
            "climbs",
            "workflow 'climbs': plugin 'climbs' (rllm-hostile 6.6) is broken: rllm_hostile/records.py:7: ValueError",
        ),
        (
            "exits-in-hook",
            "exits-in-hook",
            "plugin 'exits-in-hook' (rllm-hostile 6.6) is broken: rllm_hostile/exits_in_hook.py:10: SystemExit",
        ),
    ],
)
def test_selecting_one_of_them_is_an_error_of_one_line(
    rllm_core: Run, installed: Callable[..., list[str]], testing_plugin: str, tmp_path: Path, workflow: str,
    plugin: str, problem: str,
) -> None:  # fmt: skip
    path = beside(installed, testing_plugin)
    run = rllm_core(*training(workflow, tmp_path / "run"), PYTHONPATH=path, RLLM_PLUGINS=f"testing,good,{plugin}")
    assert run.returncode == 2
    [line] = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert problem in line
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_who_hangs_can_be_left_out(
    rllm_core: Run, installed: Callable[..., list[str]], testing_plugin: str, tmp_path: Path
) -> None:
    """Plugins that are not excluded are imported, because their hooks may observe the run."""
    path, only = beside(installed, testing_plugin), {"RLLM_PLUGINS": "testing,good,endless-hook"}
    left_out = ("--no-plugins=endless-hook", *training("say_yes", tmp_path / "run"))
    assert rllm_core(*left_out, PYTHONPATH=path, **only).returncode == 0


# --------------------------------------------------------------------------------------------------------------------
# Metadata


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "metadata"),
    [
        ("1.0", ""),
        ("1.0", "Metadata-Version: 2.1\nName: rllm-odd\nVersion: not a version\n"),
        ("1.0", "Metadata-Version: 2.1\nName: rllm-odd\nVersion: 1.0\nRequires-Dist: ??? >= many\n"),
        ("one.two", "\x00\x01 no headers at all"),
        ("1.0", "Metadata-Version: 99.0\nName: \x1b[2J\x1b]0;owned\x07\nVersion: \u202e0.1\x9b31m\n"),
    ],
    ids=["empty", "version", "requirement", "binary", "control"],
)
def test_damaged_metadata_disturbs_no_listing(rllm_core: Run, tmp_path: Path, version: str, metadata: str) -> None:
    site = distribution(tmp_path / "odd", "rllm-odd", version, "odd = rllm_devkit.scripted_plugin", metadata=metadata)
    path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
    for command in (("plugins",), ("plugins", "--json"), ("plugins", "--load"), ("doctor",)):
        run = rllm_core(*command, PYTHONPATH=path, RLLM_PLUGINS="odd")
        assert run.returncode == 0 or command == ("doctor",), run.stderr
        assert "odd" in run.stdout
        assert not CONTROL & set(run.stdout + run.stderr)
        assert "Traceback" not in run.stderr


@pytest.mark.parametrize("value", ["../../etc/passwd", "a b c", "os; import this", "", "x:\x1b[2J"])
def test_an_entry_point_that_is_no_dotted_path_is_never_imported(rllm_core: Run, tmp_path: Path, value: str) -> None:
    site = distribution(tmp_path / "odd", "rllm-odd", "1.0", f"odd = {value}")
    path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
    run = rllm_core("plugins", "--json", PYTHONPATH=path)
    assert run.returncode == 0, run.stderr
    [row] = [row for row in json.loads(run.stdout) if row["package"] == "rllm-odd"]
    assert row["status"] == "broken"
    assert not CONTROL & set(run.stdout)


@pytest.mark.parametrize("name", ["../odd", "Odd", "o" * 65, "odd\u202e", "\x1b[2Jodd"])
def test_an_entry_point_with_another_name_is_broken(rllm_core: Run, tmp_path: Path, name: str) -> None:
    site = distribution(tmp_path / "odd", "rllm-odd", "1.0", f"{name} = rllm_devkit.scripted_plugin")
    path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
    for arguments in (("plugins",), ("plugins", "--json"), ("workflows",)):
        run = rllm_core(*arguments, PYTHONPATH=path)
        assert run.returncode == 0, run.stderr
        assert not CONTROL & set(run.stdout + run.stderr)
    assert "must match" in run.stderr
