"""The code of the pages on verifiers, with verifiers in an environment of its own, and on gymnasium."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.errors import ConfigError
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


def blocks(language: str, pages: Sequence[Path] = PAGES) -> list[str]:
    texts = [page.read_text(encoding="utf-8") for page in pages]
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


def test_a_file_registers_an_environment_of_gymnasium(tmp_path: Path) -> None:
    pages = [ROOT / "docs/environments/gymnasium.md"]
    [game], [run_file] = blocks("python", pages), [each for each in blocks("toml", pages) if "imports" in each]
    (tmp_path / "reverse.toml").write_text(run_file, encoding="utf-8")
    config = load_run_config(str(tmp_path / "reverse.toml"), PluginManager.from_environment())
    with pytest.raises(ConfigError, match=r"gymnasium\.imports: .*my_game\.py' cannot be imported: FileNotFound"):
        assemble(config, PluginManager.from_environment())
    (tmp_path / "my_game.py").write_text(game, encoding="utf-8")
    parts = assemble(config, PluginManager.from_environment())
    assert parts.workflow.made().reset(0)
    assert parts.sources == [str(tmp_path / "my_game.py")]
