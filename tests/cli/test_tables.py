"""Tests tables on terminals of any width."""

from __future__ import annotations

import io
import re

import pytest

from rllm_core.cli.tables import echo_table

HEADERS = ("NAME", "STATUS", "PACKAGE", "VERSION", "ERROR")
ROWS = [
    ("renderers", "available", "rllm-renderers", "0.1.0", ""),
    ("workflows-of-mine", "broken", "rllm-workflows", "0.1.0", "ImportError: no module named torch; install it"),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", terminal)
    echo_table(HEADERS, ROWS)
    return [re.sub(r"\x1b\[\d*m", "", line).rstrip() for line in terminal.getvalue().splitlines()]


@pytest.mark.parametrize("columns", [30, 40, 60])
def test_no_word_is_broken_on_a_narrow_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(columns, monkeypatch)
    assert max(map(len, lines)) <= columns
    words = " ".join(lines).split()
    for row in ROWS:
        assert set(" ".join(row).split()) <= set(words)
    assert lines[0] == "renderers"
    assert "  STATUS: available" in lines
    assert not [line for line in lines[:4] if "ERROR" in line], "what says nothing takes no line"


def test_a_wide_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    header, *lines = shown(120, monkeypatch)
    assert header.split() == list(HEADERS)
    assert len(lines) == len(ROWS)
