"""Tests that the diagrams are generated from their text and need no external resources."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import diagrams
import pytest
from pages import PAGES

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_it_is_what_is_drawn(name: str) -> None:
    text = (diagrams.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert diagrams.DIAGRAMS[name]().svg() == text, "run make docs-reference"
    assert any(f"(images/{name}.svg)" in page.text for page in PAGES)
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_everything_is_inside(name: str) -> None:
    picture = ElementTree.fromstring(diagrams.DIAGRAMS[name]().svg())
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    for box in picture.findall(f"{SVG}rect")[1:]:
        x, y, w, h = (float(box.attrib[key]) for key in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= 0
        assert x + w <= width
        assert y + h <= height
    for words in picture.findall(f"{SVG}text"):
        long = 6.6 * len(words.text or "")  # approximate width of a letter in this size
        begin = float(words.attrib["x"]) - {"start": 0.0, "middle": 0.5, "end": 1.0}[words.attrib["text-anchor"]] * long
        assert begin >= 0, words.text
        assert begin + long <= width, words.text
