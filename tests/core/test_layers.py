"""Tests that the core's rooms import each other in one direction, and its modules without circles.

Imports in functions and for type checkers count, too: a reader has to follow them all the same.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from architecture import PICTURE, ROOMS, Import, drawing, imports, modules, room_of

# Imports of a later room. At most two of them may stay.
BACK_UP: Mapping[str, str] = {
    " -> from_python": "for type checkers: rllm_core.train is imported when a program uses it",
    "plugins.probe -> sandbox.in_child": "to end a child process with its parent, on both sides of the contracts",
}


def back_up(found: Iterable[Import]) -> set[str]:
    order = {room.name: number for number, room in enumerate(ROOMS)}
    return {str(one) for one in found if order[room_of(one.imported).name] > order[room_of(one.importer).name]}


def circle(found: Iterable[Import]) -> list[str]:
    graph: dict[str, set[str]] = {}
    for one in found:
        graph.setdefault(one.importer, set()).add(one.imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_every_module_is_in_a_room() -> None:
    for module in modules():
        room_of(module)


def test_rooms_import_only_rooms_before_them() -> None:
    assert back_up(imports()) == set(BACK_UP), "see BACK_UP"


def test_modules_import_each_other_without_circles() -> None:
    assert not circle(one for one in imports() if str(one) not in BACK_UP)


def test_no_module_is_longer_than_a_reader_takes_in_at_once() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_no_other_room_imports_what_the_core_ships() -> None:
    naming = [one for one in imports() if one.imported.partition(".")[0] == "builtin"]
    assert {one.importer.partition(".")[0] for one in naming} == {"builtin"}


def test_the_page_lists_the_rooms_in_their_order() -> None:
    rows = re.findall(
        r"^\| ([a-z ]+) \| `", PICTURE.parents[1].joinpath("architecture.md").read_text(encoding="utf-8"), re.M
    )
    assert rows == [room.name for room in reversed(ROOMS)]


def test_the_picture_is_what_is_drawn() -> None:
    assert drawing().svg() == PICTURE.read_text(encoding="utf-8"), "run make docs-reference"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("import rllm_core.b", Import("a", "b", "module")),
        ("from rllm_core import b", Import("a", "b", "module")),
        ("from rllm_core.b import name", Import("a", "b", "module")),
        ("from rllm_core.c import d", Import("a", "c.d", "module")),
        ("from rllm_core.c import name", Import("a", "c", "module")),
        ("class A:\n    def f(self):\n        from rllm_core.b import name", Import("a", "b", "function")),
        ("if TYPE_CHECKING:\n    from rllm_core.b import name", Import("a", "b", "types")),
        ("try:\n    import rllm_core.b\nexcept ImportError:\n    pass", Import("a", "b", "module")),
    ],
)
def test_every_kind_of_import_is_seen(tmp_path: Path, line: str, expected: Import) -> None:
    core = tmp_path / "rllm_core"
    (core / "c").mkdir(parents=True)
    for name in ("__init__", "b", "c/__init__", "c/d"):
        (core / f"{name}.py").touch()
    (core / "a.py").write_text(line, encoding="utf-8")
    assert imports(core) == [expected]


def test_a_circle_and_a_way_back_up_are_seen() -> None:
    there, back = Import("engine", "config", "module"), Import("config", "engine", "types")
    assert set(circle([there, back])) == {"engine", "config"}
    assert not circle([there, Import("config", "errors", "module")])
    assert back_up([there, back]) == {"config -> engine"}
