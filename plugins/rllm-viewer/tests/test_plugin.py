"""Tests what the plugin imports, and that it provides its commands."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rllm_viewer
from rllm_core.plugins import PluginManager
from rllm_core.providers import CommandProvider

PACKAGE = Path(rllm_viewer.__file__).parent
# The run file, the errors, and the format of a checkpoint's manifest.
THE_VERIFIER_MAY_IMPORT = {
    "rllm_core.config",
    "rllm_core.errors",
    "rllm_core.run_folder.checkpoint",
    "rllm_core.run_folder.groups",
}


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


@pytest.mark.parametrize("path", sorted((PACKAGE / "verify").glob("*.py")), ids=lambda path: path.name)
def test_the_verifier_shares_nothing_with_the_loop(path: Path) -> None:
    """Shared code would make the same mistake on both sides."""
    assert imported(path) <= THE_VERIFIER_MAY_IMPORT


def test_the_test_sees_what_is_imported() -> None:
    assert imported(PACKAGE / "verify" / "comparisons.py") == {"rllm_core.errors", "rllm_core.run_folder.checkpoint"}


def test_it_provides_its_commands_through_their_hook() -> None:
    plugins = PluginManager()
    plugins.register(rllm_viewer, "viewer")
    provided = plugins.providers(CommandProvider)
    assert set(provided) == {
        "chat",
        "compare",
        "diagnose",
        "export",
        "export-model",
        "import",
        "runs",
        "show",
        "verify",
        "view",
    }
    assert [plugins.load(command).name for command in provided.values()] == list(provided)
