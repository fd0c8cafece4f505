"""Tests docs/writing-a-workflow.md literally: every command in order, every change, every output."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from following import followed
from pages import ROOT, Page

PAGE = Page(ROOT / "docs" / "writing-a-workflow.md")
# Output that varies with the machine or the number of checks.
VARIABLE = re.compile(
    r"(?P<left_out>\.\.\.)|(?P<count>[\d,]+(?= passed| tokens))|(?P<seconds>\d+(?:\.\d+)?(?= ?s\b))"
    r"|(?<![\d.])(?P<number>\d+\.\d+)(?![\d.])"
)
LIKE = {"left_out": r"(?s:.*?)", "count": r"[\d,]+", "seconds": r"\d+(?:\.\d+)?", "number": r"(\d+\.\d+)"}
TOLERANCE = 0.15


def assert_as_shown(printed: str, shown: str, command: str) -> None:
    """Asserts that output is as shown, except for variable parts; other numbers must be close."""
    pattern, expected, end = "", list[float](), 0
    for found in VARIABLE.finditer(shown):
        pattern += re.escape(shown[end : found.start()]) + LIKE[str(found.lastgroup)]
        expected += [float(found[0])] if found.lastgroup == "number" else []
        end = found.end()
    match = re.fullmatch(pattern + re.escape(shown[end:]), printed)
    assert match, f"$ {command}\n{printed}\n\nand the page shows\n\n{shown}"
    for seen, number in zip(map(float, match.groups()), expected, strict=True):
        assert abs(seen - number) <= TOLERANCE, f"$ {command} prints {seen}, and the page shows {number}"


@pytest.mark.parametrize(
    ("printed", "agrees"),
    [
        ("solved 0.91 after 7.5 s of version 0.1.0", True),
        ("solved 0.71 after 7.5 s of version 0.1.0", False),
        ("solved 0.91 after 7.5 s of version 0.1.1", False),
        ("failed 0.91 after 7.5 s of version 0.1.0", False),
    ],
)
def test_outputs_are_compared(printed: str, agrees: bool) -> None:
    shown = "solved 0.98 after 41 s of version 0.1.0"
    if agrees:
        assert_as_shown(printed, shown, "any")
    else:
        with pytest.raises(AssertionError):
            assert_as_shown(printed, shown, "any")


def changed(diff: str, folder: Path) -> None:
    """Applies a unified diff to a file; the changed lines must occur exactly once."""
    _, name, *lines = diff.splitlines()
    path = folder / name.removeprefix("+++ ")
    for hunk in re.split(r"^@@.*\n", "\n".join(lines) + "\n", flags=re.M)[1:]:
        before, after = (
            "".join(f"{line[1:]}\n" for line in hunk.splitlines() if not line.startswith(other)) for other in "+-"
        )
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{name} does not have\n{before}"
        path.write_text(text.replace(before, after), encoding="utf-8")


@pytest.mark.slow
def test_the_page_can_be_followed(environment: Mapping[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    # A check probes all plugins that are installed; a reader has only those of the page.
    environment = {**environment, "RLLM_PLUGINS": "descend,devkit,local,renderers,viewer"}
    steps = 0
    for block in PAGE.blocks:
        if block.language == "diff":
            changed(block.text, folder)
        for part in re.split(r"^\$ ", block.text, flags=re.M)[1:] if block.language == "console" else []:
            command, _, shown = part.partition("\n")
            printed, folder = followed(command, folder, environment)
            if shown.strip():
                assert_as_shown(printed.strip(), shown.strip(), command)
            steps += 1
    assert steps > 8
