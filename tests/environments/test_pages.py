"""The run files and the taskset of the page on verifiers, with verifiers in an environment of its own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from rllm_core.assembly.resolution import load_run_config
from rllm_core.plugins import PluginManager

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs/environments/verifiers.md", ROOT / "plugins/rllm-verifiers/README.md")
PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
LOADED = """
from rllm_verifiers.config import VerifiersConfig
from rllm_verifiers.workflow import VerifiersWorkflow
workflow = VerifiersWorkflow(VerifiersConfig(environment="./capital.py"))
print([task.data["row"]["prompt"] for task in workflow.tasks("train")])
"""


def blocks(language: str) -> list[str]:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    return [block for text in texts for block in re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)]


def test_run_files_load(tmp_path: Path) -> None:
    (tmp_path / "earliest.py").write_bytes((ROOT / "examples" / "verifiers" / "earliest.py").read_bytes())
    run_files = [block for block in blocks("toml") if "workflow =" in block]
    assert len(run_files) >= 2
    for number, block in enumerate(run_files):
        path = tmp_path / f"{number}.toml"
        path.write_text(block.replace(".venv-verifiers/bin/python", str(PYTHON)), encoding="utf-8")
        assert load_run_config(str(path), PluginManager.from_environment()).rollout.python == str(PYTHON)


def test_the_taskset_loads(tmp_path: Path) -> None:
    [block] = blocks("python")
    (tmp_path / "capital.py").write_text(block, encoding="utf-8")
    done = subprocess.run(
        [PYTHON, "-c", LOADED], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert "Capital of France?" in done.stdout, done.stderr
