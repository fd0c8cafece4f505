"""Tests that templates of ``rllm-core new`` import only names that the page about compatibility lists as stable."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator

import pytest
from pages import ROOT, Page

from rllm_devkit.templates import KINDS, template

OURS = ("rllm_core", "rllm_devkit")
LISTED = Page(ROOT / "docs" / "compatibility.md").rows("Python names")


def imports(kind: str) -> Iterator[tuple[str, str]]:
    """Yields the module and the name of every import from our packages."""
    for path, text in template(kind).items():
        for node in ast.walk(ast.parse(text)) if path.endswith(".py") else ():
            if isinstance(node, ast.Import):
                assert not [alias for alias in node.names if alias.name.startswith(OURS)], f"{path} imports a module"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
                yield from ((str(node.module), alias.name) for alias in node.names)


def is_stable(module: str, name: str) -> bool:
    [names] = LISTED.get(module, [""])
    if names == "public names":
        return not name.startswith("_")
    if names == "names in `__all__`":
        return name in importlib.import_module(module).__all__
    return name in re.findall(r"`(\w+)`", names)


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_imports_stable_names_only(kind: str) -> None:
    imported = set(imports(kind))
    assert {module for module, _ in imported} >= {"rllm_core"}
    assert [name for name in sorted(imported) if not is_stable(*name)] == []


def test_what_is_listed_exists() -> None:
    for module, [names] in LISTED.items():
        found = importlib.import_module(module)
        assert [name for name in re.findall(r"`(\w+)`", names) if name != "__all__" and not hasattr(found, name)] == []
        if "`__all__`" in names:
            assert found.__all__


@pytest.mark.parametrize(
    ("module", "name"),
    [("rllm_core.plugins", "discovery"), ("rllm_core.runs.launch", "train"), ("rllm_core.types", "_readable")],
)
def test_other_names_are_not_stable(module: str, name: str) -> None:
    assert not is_stable(module, name)
