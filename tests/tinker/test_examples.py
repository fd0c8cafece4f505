"""The example run files are valid, for the hosted service and for a self-hosted server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import COMMAND
from server import REPOSITORY

EXAMPLES = sorted((REPOSITORY / "plugins" / "rllm-tinker" / "examples").glob("*.toml"))


def dry_run(path: Path, *overrides: str, key: str = "") -> subprocess.CompletedProcess[str]:
    command = [COMMAND, "train", path, "--dry-run"]
    for override in overrides:
        command += ["-o", override]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"TINKER_API_KEY": key}
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid(path: Path) -> None:
    hosted = dry_run(path, key="tml-only-for-show")
    assert hosted.returncode == 0, hosted.stderr
    assert "not checked: the hosted Tinker service" in hosted.stdout
    assert "tml-only-for-show" not in hosted.stdout + hosted.stderr
    own = dry_run(path, "tinker.base_url=http://localhost:8000", "tinker.service=skyrl", "optimizer.max_grad_norm=1e6")
    assert own.returncode == 0, own.stderr
    without_key = dry_run(path)
    assert without_key.returncode == 2
    assert "TINKER_API_KEY is not set" in without_key.stderr


def test_there_is_one_for_each_loop() -> None:
    assert [path.stem for path in EXAMPLES] == ["countdown-async", "countdown"]
