"""Tests what a run knows of a class that a Python program has passed: its provider and its source."""

from __future__ import annotations

import linecache
from collections.abc import Iterator

import pytest

from rllm_core.errors import ConfigError, PluginError
from rllm_core.plugins.classes import named, provided_by_class, source_of
from rllm_core.providers import BackendProvider, WorkflowProvider
from rllm_core.workflow import Workflow, WorkflowConfig

CLASSES = '''class LettersConfig(WorkflowConfig):
    letters: int = 3


@marked
class Letters(Workflow):
    config_model = LettersConfig

    def tasks(self, split):
        return []

    async def run(self, task, completer):
        """Never called."""
'''
CELL = f"kept = False\n\n\n{CLASSES}\n\nclass Other:\n    pass\n"
FILE = "/nowhere/ipykernel/cell.py"


@pytest.fixture
def letters() -> Iterator[type[Workflow]]:
    """A class as a cell of a notebook defines it: in ``__main__``, with a source but without a file."""
    linecache.cache[FILE] = (len(CELL), None, CELL.splitlines(keepends=True), FILE)
    world = {"__name__": "__main__", "Workflow": Workflow, "WorkflowConfig": WorkflowConfig, "marked": lambda one: one}
    exec(compile(CELL, FILE, "exec"), world)  # noqa: S102 - as a notebook does
    yield world["Letters"]  # type: ignore[misc]
    linecache.cache.pop(FILE, None)


def test_the_source_is_that_of_the_class_and_its_settings(letters: type[Workflow]) -> None:
    assert source_of(named(letters, {})) == CLASSES


def test_a_class_whose_text_is_gone_has_no_source(letters: type[Workflow]) -> None:
    del linecache.cache[FILE]
    assert source_of(named(letters, {})) == ""


def test_a_class_without_a_line_of_its_own_has_no_source(letters: type[Workflow]) -> None:
    bare = type("Bare", (letters,), {"__module__": "__main__"})
    assert source_of(named(bare, {})) == ""


def test_the_class_is_provided_to_its_program_only_and_as_a_workflow(letters: type[Workflow]) -> None:
    reference = named(letters, {})
    assert provided_by_class(WorkflowProvider, reference).record.summary == "class Letters of this program"
    for kind, other in ((WorkflowProvider, f"{reference}Gone"), (BackendProvider, reference)):
        with pytest.raises(PluginError, match=f"{kind.kind} {other!r} is a class of a Python program"):
            provided_by_class(kind, other)


def test_an_incomplete_class_is_refused_with_what_it_lacks(letters: type[Workflow]) -> None:
    half = type("Half", (Workflow,), {"run": vars(letters)["run"]})
    with pytest.raises(ConfigError, match=r"class Half .* lacks tasks$"):
        named(half, {})
    with pytest.raises(ConfigError, match=r"it lacks rllm_core\.workflow\.Workflow$"):
        named(int, {})
