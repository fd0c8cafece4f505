"""Shows third-party text and numbers in a terminal: escaped, cut to width, and readable without color."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.:-=+*#"
GAP = ".."
INDENT = 2
LABEL_COLUMNS = 10
ABSENT = "-"


def console() -> Console:
    """Returns a console for standard output, as wide as the terminal, or 80 columns without one."""
    return Console(highlight=False, markup=False, emoji=False)


def visible(text: str) -> str:
    """Returns ``text`` with control, bidirectional and invisible characters as escapes; newlines and tabs stay.

    Tabs become spaces, whose width is known. Characters that standard output cannot encode are escaped, too.
    """
    encoding = _encoding()
    text = text.replace("\t", "    ").encode(encoding, "backslashreplace").decode(encoding)
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else _escaped(one) for one in text)


def visible_line(text: str) -> str:
    """Returns ``text`` as one line without characters that a terminal would interpret."""
    return visible(text.replace("\t", "\\t")).replace("\n", "\\n")


def quoted(text: str) -> str:
    """Returns ``text`` in quotes, so that leading and trailing white space is visible, too."""
    return f'"{visible_line(text)}"'


def cut(text: str, characters: int) -> str:
    """Cuts the middle out of a longer text, and marks how much is missing."""
    left_out = len(text) - characters
    if left_out <= 0:
        return text
    end = characters // 3
    return f"{text[: characters - end]} [... {left_out:,} characters ...] {text[len(text) - end :]}"


def fitted(text: str, columns: int) -> str:
    """Cuts the middle out of a line that is wider than ``columns``."""
    if cell_len(text) <= columns:
        return text
    left = columns - len(GAP)
    if left < 1:
        return GAP[: max(columns, 0)]
    end = text[len(text) - left // 2 :]
    while cell_len(end) > left // 2:
        end = end[1:]
    start = text[:left]
    while cell_len(start) + cell_len(end) > left:
        start = start[:-1]
    return f"{start}{GAP}{end}"


def number(value: float | None) -> str:
    """Formats a number in about four digits; neither a missing nor a small number appears as 0."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return f"{value:.0f}"
    return f"{value:.3f}" if 0.001 <= abs(value) < 100 else f"{value:.4g}" if abs(value) >= 100 else f"{value:.1e}"


def share(value: float | None) -> str:
    """Formats a share in percent, as the page does; only 0 appears as 0 %, and only 1 as 100 %."""
    if value is None:
        return ABSENT
    percent = math.floor(value * 100 + 0.5)
    return "<1%" if percent == 0 < value else ">99%" if percent == 100 and value < 1 else f"{percent}%"


def spread(values: Sequence[float]) -> str:
    """Formats numbers as one number if all are equal, else as their range."""
    if not len(values):
        return ABSENT
    lowest, highest = float(min(values)), float(max(values))
    return number(lowest) if lowest == highest else f"{number(lowest)} to {number(highest)}"


def sparkline(values: Sequence[float | None], lowest: float | None = None, highest: float | None = None) -> str:
    """Draws numbers as bars between their own or the given extremes; a missing number is a space."""
    shown = [value if value is not None and math.isfinite(value) else None for value in values]
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    low = min(known) if lowest is None else lowest
    high = max(known) if highest is None else highest
    bars = BARS if visible(BARS) == BARS else ASCII_BARS
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else bars[round((value - low) * scale)] for value in shown)


@dataclass(frozen=True)
class Labeled:
    """A block of text next to its label, which is cut to fit its column."""

    label: str
    content: Text

    def __rich_console__(self, screen: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the lines of the block, without trailing spaces."""
        width = max(options.max_width - INDENT - LABEL_COLUMNS - 1, LABEL_COLUMNS)
        label = fitted(visible_line(self.label), LABEL_COLUMNS)
        for line in self.content.wrap(screen, width, overflow="fold") or [Text("")]:
            start = " " * INDENT + label + " " * (LABEL_COLUMNS - cell_len(label) + 1)
            line.rstrip()
            yield Text.assemble((start, "bold"), line)
            label = ""


def labeled(label: str, content: str, style: str = "") -> Labeled:
    """Returns third-party text next to its label."""
    return Labeled(label, Text(visible(content), style=style))


def columns_of(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Table:
    """Returns rows as a table; the columns in ``right`` are right-aligned, and long cells wrap."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for position, header in enumerate(headers):
        side: Any = "right" if position in right else "left"
        table.add_column(header, justify=side, overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible_line(cell)) for cell in row))
    return table


def value_text(value: Any) -> str:
    """Formats JSON data on one line."""
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def pairs(values: Mapping[str, Any]) -> str:
    """Formats named numbers and texts on one line."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in values.items())


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
