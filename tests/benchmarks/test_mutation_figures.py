"""Tests that the mutation benchmark draws real places, and that its figures are functions of its raw trials."""

from __future__ import annotations

from pathlib import Path

from benchmarks import mutation

CODE = '''"""Adds 1."""

from __future__ import annotations


def added(number: int | None) -> int:
    """Adds 1 if there is a number."""
    steps: int | None = 1
    return number + 1 if number is not None else 0
'''


def test_annotations_docstrings_and_imports_are_no_places(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(CODE)
    assert mutation.excluded_lines(file) == {1, 3, 6, 7, 8}


def test_tests_that_name_the_module_come_first(tmp_path: Path) -> None:
    lines = {"test_a": "", "test_b": "from rllm_core.parser import x", "test_c": "import rllm_core.parser.session"}
    for name, line in lines.items():
        (tmp_path / "core").mkdir(exist_ok=True)
        (tmp_path / "core" / f"{name}.py").write_text(line)
    found = mutation.Checkout(tmp_path).nearest_first(("core",), "rllm_core/parser/session.py")
    assert found == ["core/test_c.py", "core/test_b.py", "core/test_a.py"]


def test_figures_count_by_revision_and_room() -> None:
    mutant = {"kind": "mutant", "file": "a.py", "line": 3, "operator": "core/AddNot", "occurrence": 0}
    rows = [
        {"kind": "conditions"},
        {**mutant, "revision": "before", "room": "parser", "outcome": "killed"},
        {**mutant, "revision": "before", "room": "parser", "outcome": "survived"},
        {**mutant, "revision": "after", "room": "parser", "outcome": "timeout"},
    ]
    assert mutation.figures(rows) == {
        "mutants": {"before/parser": 2, "after/parser": 1},
        "killed": {"before/parser": 1, "after/parser": 1},
        "survivors": ["before: a.py:3 core/AddNot"],
    }
