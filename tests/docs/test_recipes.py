"""Tests that the learning curves are drawn from records, and that pages show the commands that made them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import curves
import pytest
from pages import ROOT, Page

RECIPES = Page(ROOT / "docs" / "recipes.md")
PAGES_WITH_A_CURVE = (RECIPES, Page(ROOT / "docs" / "index.md"), Page(ROOT / "docs" / "reading-a-run.md"))


def test_every_command_has_a_record() -> None:
    assert set(curves.records()) == set(curves.COMMANDS)
    assert RECIPES.commands == list(curves.COMMANDS.values())


@pytest.mark.parametrize("name", curves.COMMANDS)
def test_a_curve_is_drawn_from_its_record(name: str) -> None:
    recorded = curves.records()[name]
    text = (curves.FOLDER / f"curve-{name}.svg").read_text(encoding="utf-8")
    assert curves.svg(name, recorded) == text, "run make docs-reference"
    assert f"(images/curve-{name}.svg)" in RECIPES.text
    picture = ElementTree.fromstring(text)
    title = picture.find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert curves.COMMANDS[name] in str(title.text)
    rows = RECIPES.text.splitlines()
    [row] = [line for line in rows if line.startswith("| [") and f"| {len(recorded['solved'])} |" in line][:1]
    assert row


@pytest.mark.parametrize("name", curves.COMMANDS)
def test_a_recipe_learns(name: str) -> None:
    """A page must not show a curve of a run that did not learn."""
    (_, before), *_, (_, after) = curves.records()[name]["validation"]
    assert before < 0.35
    assert after > 0.9
