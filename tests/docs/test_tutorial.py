"""The package of docs/writing-a-workflow.md, installed and trained as the page says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import ROOT, Page

PAGE = Page(ROOT / "docs" / "writing-a-workflow.md")
STEPS = 60


@pytest.fixture(scope="module")
def rllm_core(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs the command line where the page's package is installed."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for block in PAGE.blocks:
        if block.file:
            path = source / block.file
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
    install = ["--no-deps", "--no-index", "--no-build-isolation", "--target", site, source]
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install", *install], check=True)

    def run(*arguments: str) -> str:
        paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.run(
            [sys.executable, "-m", "rllm_core", *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    return run


def test_the_package_is_found(rllm_core: Callable[..., str]) -> None:
    [plugin] = json.loads(rllm_core("plugins", "show", "descend", "--json"))
    assert plugin["status"] == "loaded"
    assert plugin["warnings"] == []
    assert [provided["name"] for provided in plugin["provides"]] == ["descend"]


@pytest.mark.slow
def test_it_learns(rllm_core: Callable[..., str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    printed = rllm_core(
        "train", "descend", "--backend", "local", "--run-dir", str(run_dir), "-o", f"training.steps={STEPS}",
        "-o", "descend.letters=abcdefg",
    )  # fmt: skip
    assert printed.splitlines()[-1] == f"run: {run_dir}"
    first, last = json.loads((run_dir / "summary.json").read_text())["validation"]
    assert first["solved"] < 0.2
    assert last["solved"] > 0.6
