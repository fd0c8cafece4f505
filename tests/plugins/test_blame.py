"""Tests that an error is attributed to the code that raised it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import importlib_metadata
import pytest
from hostile_site import distribution

from rllm_core.builtin import sandboxes as of_the_core
from rllm_core.plugins.blame import CodePlace, blamed, blamed_json, defined_at, learn, place_of
from rllm_core.plugins.discovery import Candidate, find_plugins

SOURCE = """\
import asyncio
import json


def fails(value):
    return json.loads(value)


async def in_a_group():
    async with asyncio.TaskGroup() as group:
        group.create_task(deep())


async def deep():
    raise KeyError("tool")


class Thing:
    def method(self):
        raise TypeError("no")
"""


@pytest.fixture
def maze(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Module of plugin ``maze``, in a package shared with another plugin of the same distribution."""
    site = distribution(tmp_path, "rllm-maze", "1.2", "maze = blamed_maze.env", "lake = blamed_maze.lake")
    package = tmp_path / "blamed_maze"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "env.py").write_text(SOURCE, encoding="utf-8")
    (package / "lake.py").write_text("def broken(:\n", encoding="utf-8")
    (package / "shared.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(site)
    learn(find_plugins(importlib_metadata.distributions(path=[site])))
    import blamed_maze.env  # type: ignore[import-not-found]

    yield blamed_maze.env
    for name in [name for name in sys.modules if name.partition(".")[0] == "blamed_maze"]:
        del sys.modules[name]


def raised(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_last_frame_of_the_plugin_is_named_and_not_that_of_the_library_it_calls(maze: ModuleType) -> None:
    error = raised(lambda: maze.fails("{"))
    assert place_of(error) == CodePlace("blamed_maze/env.py", 6, "fails", "maze", "rllm-maze", "1.2")
    assert blamed(error).startswith("plugin 'maze' (rllm-maze 1.2), blamed_maze/env.py:6: JSONDecodeError: Expecting")
    assert blamed_json(error) == {
        "plugin": "maze",
        "distribution": "rllm-maze",
        "version": "1.2",
        "file": "blamed_maze/env.py",
        "line": 6,
        "error": "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    }
    json.dumps(blamed_json(error))


def test_of_several_plugins_in_a_package_none_is_named_for_what_they_share(maze: ModuleType) -> None:
    import blamed_maze.shared  # type: ignore[import-not-found]

    error = raised(lambda: blamed_maze.shared.fails("{"))
    assert str(place_of(error)) == "rllm-maze 1.2, blamed_maze/shared.py:6"
    at_work = Candidate("lake", "rllm-maze", "1.2", "blamed_maze.lake")
    assert blamed(error, at_work).startswith("plugin 'lake' (rllm-maze 1.2), blamed_maze/shared.py:6: JSONDecode")


def test_a_member_of_a_group_says_more_than_where_the_group_was_waited_for(maze: ModuleType) -> None:
    error = raised(lambda: asyncio.run(maze.in_a_group()))
    assert isinstance(error, ExceptionGroup)
    assert str(place_of(error)).endswith("blamed_maze/env.py:15")


def test_what_the_core_makes_of_an_error_keeps_its_place(maze: ModuleType) -> None:
    def wrapped() -> None:
        try:
            maze.fails("{")
        except ValueError as cause:
            made = RuntimeError("made by the core")
            made.__cause__ = cause
            kept.append(made)

    kept: list[BaseException] = []
    wrapped()
    assert str(place_of(kept[0])).endswith("blamed_maze/env.py:6")


def test_a_syntax_error_is_at_its_own_line(maze: ModuleType) -> None:
    error = raised(lambda: __import__("blamed_maze.lake"))
    assert str(place_of(error)) == "plugin 'lake' (rllm-maze 1.2), blamed_maze/lake.py:1"


def test_code_that_is_no_plugin_has_a_file_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    place = place_of(raised(lambda: [].pop()))
    assert place is not None
    assert (place.file, place.plugin, place.distribution) == ("test_blame.py", None, None)
    monkeypatch.chdir("/")
    assert str(place_of(raised(lambda: [].pop()))).startswith(f"{Path(__file__)}:")


def test_without_a_frame_of_theirs_there_is_no_place() -> None:
    assert place_of(ValueError("never raised")) is None
    assert blamed(ValueError("never raised")) == "ValueError: never raised"
    owner = Candidate("lake", "rllm-maze", "1.2", "blamed_maze.lake")
    assert blamed(ValueError("never raised"), owner) == "plugin 'lake' (rllm-maze 1.2): ValueError: never raised"
    assert blamed_json(ValueError("x"), owner)["line"] is None


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert place_of(first) is None


def test_what_is_defined_has_a_place_too(maze: ModuleType) -> None:
    assert str(defined_at(maze.fails)) == "plugin 'maze' (rllm-maze 1.2), blamed_maze/env.py:5"
    assert str(defined_at(maze.Thing.method)) == "plugin 'maze' (rllm-maze 1.2), blamed_maze/env.py:19"
    assert str(defined_at(maze.Thing)).startswith("plugin 'maze' (rllm-maze 1.2), blamed_maze/env.py:1")
    assert defined_at(of_the_core) is None
    assert defined_at(json.loads) is None
