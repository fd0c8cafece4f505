"""Tests what the plugin imports, and that its command reads the folder of a run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rllm_viewer
from rllm_core.plugins import PluginManager
from rllm_core.providers import CommandProvider

PACKAGE = Path(rllm_viewer.__file__).parent
# The run file, the errors, and the format of a checkpoint's manifest.
THE_VERIFIER_MAY_IMPORT = {"rllm_core.config", "rllm_core.errors", "rllm_core.run_folder.checkpoint"}


def imported(path: Path) -> set[str]:
    """Returns the modules of the core that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            is_package = node.module in ("rllm_core", "rllm_core.run_folder", "rllm_core.training")
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if is_package else {node.module}
    return {name for name in names if name.partition(".")[0] == "rllm_core"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_of_the_loop_is_shared(path: Path) -> None:
    """Shared code would make the same mistake on both sides."""
    names = imported(path)
    assert not [name for name in names if name.startswith(("rllm_core.training", "rllm_core.assembly"))]
    if path.parent.name == "verify":
        assert names <= THE_VERIFIER_MAY_IMPORT


def test_the_test_sees_what_is_imported() -> None:
    assert imported(PACKAGE / "verify" / "comparisons.py") == {"rllm_core.errors", "rllm_core.run_folder.checkpoint"}


def test_it_provides_the_command_through_its_hook() -> None:
    plugins = PluginManager()
    plugins.register(rllm_viewer, "viewer")
    assert set(plugins.providers(CommandProvider)) == {"verify"}
    assert plugins.load(plugins.providers(CommandProvider)["verify"]).name == "verify"
