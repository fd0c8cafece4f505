"""Tests that every message on the troubleshooting page exists in the sources."""

from __future__ import annotations

import re

import pytest
from pages import ROOT, Page, says

PAGE = Page(ROOT / "docs" / "troubleshooting.md")
SOURCES = sorted([*(ROOT / "rllm_core").rglob("*.py"), *(ROOT / "plugins").glob("*/rllm_*/**/*.py")])
MESSAGES = re.findall(r"^\| `(.+?)` \|", PAGE.text, re.M)


def test_every_row_begins_with_a_message() -> None:
    rows = [
        line for line in PAGE.text.splitlines() if line.startswith("| ") and not line.startswith(("| message", "| ---"))
    ]
    assert len(rows) == len(MESSAGES) == len(set(MESSAGES))


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_that_is_explained_exists(message: str) -> None:
    assert len(re.sub(r"\W|\.\.\.", "", message)) >= 8, "so short a pattern would match anything"
    assert says(SOURCES, message)


def test_a_message_that_nobody_says_is_found_out() -> None:
    assert not says(SOURCES, "the policy has gone for a walk")
