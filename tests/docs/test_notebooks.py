"""Runs the notebooks of the documentation in a kernel, and compares them with their saved outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from notebooks import executed, notebooks, rendered
from pages import ROOT

MAX_BYTES = 200_000


def shape(notebook: Mapping[str, Any]) -> list[tuple[str, list[Any]]]:
    """Returns the source of each cell, and the kinds of its outputs."""
    return [
        (
            "".join(cell["source"]),
            [(output["output_type"], sorted(output.get("data", []))) for output in cell.get("outputs", [])],
        )
        for cell in notebook["cells"]
    ]


def learned(notebook: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Returns the solve rates that the notebook shows, before and after."""
    return [
        (float(before), float(after))
        for before, after in re.findall(r"solved (\d\.\d+) -> (\d\.\d+)", json.dumps(notebook))
    ]


def test_there_are_some() -> None:
    assert notebooks()


@pytest.mark.slow
@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_every_cell_runs_and_gives_the_saved_kinds_of_outputs(path: Path) -> None:
    saved, now = json.loads(path.read_text(encoding="utf-8")), executed(path)
    assert shape(now) == shape(saved), "run python docs/notebooks.py"
    assert len(learned(now)) == len(learned(saved)) > 0
    for before, after in learned(now):
        assert after > before + 0.4


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_saved_notebooks_are_small_and_name_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < MAX_BYTES
    page = rendered(path)
    assert re.findall(r"(?<![\w.])/(?:home|root|tmp|work|Users|opt|mnt|var)/|\bTraceback\b", page.markdown) == []
    assert all(picture.startswith(b"\x89PNG") for picture in page.pictures.values())
    assert page.pictures
    for name in page.pictures:
        assert f"]({name})" in page.markdown


def test_links_lead_to_pages() -> None:
    for path in notebooks():
        for link in re.findall(r"\]\(([^)\s#]+\.md)", rendered(path).markdown):
            assert (path.parent / link).resolve().is_file(), link
            assert (path.parent / link).resolve().is_relative_to(ROOT)
