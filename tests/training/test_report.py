"""Tests that the plot of a run never affects how the run ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rllm_viewer
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_viewer import plot

RunScripted = Callable[..., Any]


class Notes(Progress):
    """Display that records its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    closing = note


@pytest.fixture
def plugins(plugins: PluginManager) -> PluginManager:
    """Adds rllm-viewer, which draws the plot."""
    plugins.register(rllm_viewer, "viewer")
    return plugins


@pytest.mark.slow
@pytest.mark.parametrize("name", [b"a$\\nope$", b"$x_{$", b"l\xc3\xa4uf", b"l\xe4uf"])
def test_a_folder_of_any_name_gets_its_picture(run_scripted: RunScripted, tmp_path: Path, name: bytes) -> None:
    """Covers names the locale cannot decode, which Python represents with surrogate escapes."""
    path, notes = tmp_path / os.fsdecode(name), Notes()
    run = run_scripted("training.steps=1", path=path, progress=notes)
    assert run.error is None
    assert (path / "reward.png").is_file()
    assert not [note for note in notes.notes if "reward.png" in note]


def test_utf8_is_read_where_the_locale_does_not() -> None:
    in_c = "läuf".encode().decode("ascii", "surrogateescape")
    assert plot._as_text(in_c) == "läuf"
    assert plot._as_text("läuf") == "läuf"


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (ValueError("bad\nfont"), "no reward.png: ValueError: bad font"),
        (OSError(28, "No space left on device"), "no reward.png: No space left on device"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_a_note(
    run_scripted: RunScripted, monkeypatch: pytest.MonkeyPatch, error: Exception, note: str
) -> None:
    def fails(path: Path) -> None:
        raise error

    monkeypatch.setattr(plot, "plot_reward", fails)
    notes = Notes()
    run = run_scripted("training.steps=1", progress=notes)
    assert run.error is None
    assert run.summary["status"] == "completed"
    assert note in notes.notes
