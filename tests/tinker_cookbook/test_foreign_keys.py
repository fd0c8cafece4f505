"""Tests that the names that errors attribute to tinker-cookbook are fields of its configurations."""

from __future__ import annotations

import ast
from pathlib import Path

import tinker_cookbook

from rllm_core.run_file import foreign_keys


def test_tinker_cookbook_has_the_fields_that_errors_explain() -> None:
    known = {
        statement.target.id
        for path in Path(tinker_cookbook.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    named = {name for name, entry in foreign_keys().items() if "tinker-cookbook" in entry["of"]}
    assert len(named) > 15
    assert sorted(named - known) == []
