"""The plugin that docs/plugins.md tells a reader to write is written, installed and found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

DOCUMENTATION = Path(__file__).parent.parent.parent / "docs" / "plugins.md"
BUILD_SYSTEM = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
"""


def test_the_tutorial_makes_a_plugin_that_works(
    rllm_core: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    tutorial = DOCUMENTATION.read_text(encoding="utf-8").partition("## Write one")[2].partition("\n## ")[0]
    [table] = re.findall(r"```toml\n(.*?)```", tutorial, flags=re.DOTALL)
    [module] = re.findall(r"```python\n(.*?)```", tutorial, flags=re.DOTALL)
    project = tmp_path / "rllm-x"
    (project / "rllm_x").mkdir(parents=True)
    (project / "pyproject.toml").write_text(table.replace("[project]", '[project]\nversion = "0.1"') + BUILD_SYSTEM)
    (project / "rllm_x" / "__init__.py").write_text(module)
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--target", site, project], check=True)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    [row] = json.loads(rllm_core("plugins", "show", "x", "--json", PYTHONPATH=path).stdout)
    assert row["status"] == "loaded"
    assert row["hooks"] == ["backends"]
    assert row["provides"] == [{"kind": "backend", "name": "x", "summary": "What it is, in one line."}]
    assert row["missing"] == []
