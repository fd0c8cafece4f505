"""Tests ``rllm-core backends``: the capabilities of each, and that a broken one does not affect the others."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
KEYS = ["name", "status", "capabilities", "error", "summary", "package", "version", "plugin", "load"]
PACKAGES, ONLY = ("rllm-good", "rllm-backends", "rllm-thirds"), {"RLLM_PLUGINS": "good,bad-backends,thirds"}


@pytest.mark.slow
def test_every_backend_says_what_it_can_do_or_why_it_does_not(rllm_core_process: Run) -> None:
    first, second = (
        rllm_core_process("backends", "--json", packages=PACKAGES, PYTHONHASHSEED=seed, **ONLY) for seed in ("1", "2")
    )
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout, "sets are never written in the order of hashes"
    rows = json.loads(first.stdout)
    assert all(row.keys() == set(KEYS) for row in rows)
    assert [row["name"] for row in rows] == sorted(row["name"] for row in rows)
    found = {row["name"]: row for row in rows}
    assert {name: row["status"] for name, row in found.items()} == {
        "able": "loaded",
        "exits": "broken",
        "fails": "broken",
        "good": "loaded",
        "needy": "loaded",
        "no-backend": "broken",
        "unloadable": "broken",
    }
    assert all((row["capabilities"] is None) == (row["error"] is not None) for row in rows)
    for name, expected in {
        "exits": "its import ended the process (exit code 9): bye",
        "fails": "rllm_backends/stacks.py:32: ZeroDivisionError: division by zero",
        "needy": "needy.url is missing",
        "no-backend": "must be a subclass of rllm_core.backend.BackendProtocol",
        "unloadable": "cannot be loaded from rllm_backends.no_such_module:Any",
    }.items():
        assert expected in found[name]["error"]
        assert "\n" not in found[name]["error"]
    able = found["able"]["capabilities"]
    assert {"soft_clip", "ppo_clip", "gspo"} <= set(able["losses"])
    assert {"young_mask", "token_tis"} <= set(able["corrections"])
    assert able["vision"] is True, "asked with the section's defaults"
    assert list(able) == sorted(able) == list(found["good"]["capabilities"])


@pytest.mark.slow
def test_people_get_a_table_of_the_same(rllm_core: Run) -> None:
    run = rllm_core("backends", packages=PACKAGES, **ONLY)
    assert run.returncode == 0, run.stderr
    cells = [line.split() for line in run.stdout.splitlines()]
    assert ["by", "default", "able", "good"] in cells
    assert ["losses", "soft_clip", "yes", "no"] in cells
    assert ["losses", "reinforce", "yes", "yes"] in cells
    assert ["vision", "yes", "no"] in cells
    [needy] = [line for line in run.stdout.splitlines() if line.startswith("needy ")]
    assert needy.endswith("needy.url is missing")


@pytest.mark.slow
def test_a_backend_that_hangs_is_given_up(rllm_core: Run) -> None:
    run = rllm_core(
        "backends", "--json", "--deadline-seconds", "1.5", packages=("rllm-hanging",), RLLM_PLUGINS="hanging"
    )
    [row] = json.loads(run.stdout)
    assert row["status"] == "broken"
    assert row["error"].startswith("its import did not end within 1.5 s")


def test_a_first_party_backend_whose_plugin_is_broken_is_still_a_row(rllm_core: Run, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    info = folder / "rllm_verl-9.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rllm-verl\nVersion: 9.0\n")
    (info / "entry_points.txt").write_text("[rllm_core]\nverl = no_such_rllm_verl\n")
    run = rllm_core("backends", "--json", PYTHONPATH=str(folder), RLLM_PLUGINS="verl")
    [row] = json.loads(run.stdout)
    assert (row["name"], row["package"], row["status"], row["capabilities"]) == ("verl", "rllm-verl", "broken", None)
    assert "ModuleNotFoundError" in row["error"]
