"""Tests that a class name means one class: in the core, in each plugin, and in a plugin beside the core."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(ROOT.glob("plugins/rllm-*"))
TEMPLATES = "scaffold"  # `rllm-core new` writes one of them into a new package


@cache
def classes(folder: Path) -> list[str]:
    """Returns the name of every class in the Python files of a folder, except in the templates."""
    found: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        if TEMPLATES not in path.relative_to(folder).parts:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return found


def repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def package(plugin: Path) -> Path:
    return plugin / plugin.name.replace("-", "_")


def test_no_two_classes_of_the_core_share_a_name() -> None:
    assert not repeated(classes(ROOT / "rllm_core"))


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_no_two_classes_of_a_plugin_share_a_name(plugin: Path) -> None:
    assert not repeated(classes(package(plugin)))


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_no_class_of_a_plugin_has_the_name_of_one_of_the_core(plugin: Path) -> None:
    core = {name for name in classes(ROOT / "rllm_core") if not name.startswith("_")}
    assert not sorted(core & set(classes(package(plugin))))


def test_a_repeated_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class Row: ...\nclass Column: ...\n", encoding="utf-8")
    (tmp_path / "two.py").write_text("def make():\n    class Row: ...\n", encoding="utf-8")
    assert repeated(classes(tmp_path)) == ["Row"]
