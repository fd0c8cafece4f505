"""Tests that nothing is loaded from the working directory of a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = {
    "rllm-core": [str(Path(sys.executable).with_name("rllm-core"))],
    "python -m rllm_core": [sys.executable, "-m", "rllm_core"],
}
PLANTED = "import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch()\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_plugin_and_modules_that_lie_there_are_not_seen(command: str, tmp_path: Path) -> None:
    names = ("rllm_planted", "click", "torch", "toml", "numpy", "sitecustomize", "toxfile", "conftest", "plugins")
    for name in names:
        (tmp_path / f"{name}.py").write_text(PLANTED, encoding="utf-8")
    (tmp_path / "plugins.toml").write_text("this is no TOML", encoding="utf-8")
    info = tmp_path / "rllm_planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rllm-planted\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[rllm_core]\nplanted = rllm_planted\n", encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    # Both start the same children to load plugins.
    loading = [["plugins", "--load", "--json"]] if command == "python -m rllm_core" else []
    for arguments in (["plugins", "--json"], ["workflows", "--json"], *loading):
        run = subprocess.run(
            [*COMMANDS[command], *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        assert json.loads(run.stdout)
        assert "planted" not in run.stdout
    dry = [*COMMANDS[command], "train", "sort", "--backend", "local", "--dry-run"]
    subprocess.run(dry, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert [path.name for path in tmp_path.glob("*.ran")] == []
