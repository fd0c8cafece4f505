"""The run files in ``examples`` are valid: a dry run of each, for the starter model and for a large model.

Backend ``verl`` is not installed here. The whole run file is read and checked, and its workflow is constructed; what
the backend itself would check is tested with verl, in ``tests/verl``.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import importlib_metadata
import pytest
from click.testing import CliRunner

from rllm_core.assembly.parts import workflow_of
from rllm_core.assembly.resolution import resolve_run
from rllm_core.cli import Session, cli
from rllm_core.plugins import PluginManager
from rllm_core.plugins.discovery import find_plugins
from rllm_core.plugins.requirements import unmet

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*/*.toml"))
BACKENDS = {path: tomllib.loads(path.read_text(encoding="utf-8"))["backend"] for path in EXAMPLES}
VERL = ROOT / "plugins" / "rllm-verl"


def of_backend(name: str) -> pytest.MarkDecorator:
    chosen = [path for path in EXAMPLES if BACKENDS[path] == name]
    return pytest.mark.parametrize("path", chosen, ids=lambda path: f"{path.parent.name}-{path.stem}")


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    """The installed plugins, and rllm-verl, as if it were installed with verl."""
    project = tomllib.loads((VERL / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    about = tmp_path / f"rllm_verl-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    [(name, module)] = project["entry-points"]["rllm_core"].items()
    (about / "entry_points.txt").write_text(f"[rllm_core]\n{name} = {module}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(VERL)
    return PluginManager(find_plugins(importlib_metadata.distributions(path=[*sys.path, str(tmp_path)])))


def test_each_ecosystem_has_one_for_the_starter_model_and_one_for_a_large_model() -> None:
    ecosystems = {
        path.parent.name for path in (ROOT / "examples").iterdir() if path.is_dir() for path in path.iterdir()
    }
    for backend in ("local", "verl"):
        assert {path.parent.name for path in EXAMPLES if BACKENDS[path] == backend} == ecosystems


@pytest.mark.slow
@of_backend("local")
def test_an_example_for_the_starter_model_is_valid(path: Path) -> None:
    done = CliRunner().invoke(cli, ["train", str(path), "--dry-run", "--json"], obj=Session(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["resolved"]["backend"] == "local"


@pytest.mark.slow
@of_backend("verl")
def test_an_example_for_a_large_model_is_valid(path: Path, plugins: PluginManager) -> None:
    resolved = resolve_run(str(path), plugins)
    missing = unmet("the run file", resolved.config.requires)
    assert [lack.requirement.partition(">")[0] for lack in missing] == ["rllm-verl"]
    workflow_of(resolved)
