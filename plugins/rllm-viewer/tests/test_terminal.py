"""Third-party text in a terminal: escaped, cut, and never wider than its columns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from rllm_viewer.terminal import cut, fitted, number, quoted, share, sparkline, spread, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("a\u202eb\u200bc", r"a\u202eb\u200bc"),
        ("line\r\nnext\tone", "line\\r\nnext    one"),
        ("é 日本 naïve", "é 日本 naïve"),
    ],
)
def test_what_a_terminal_would_interpret_is_escaped(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text())
def test_visible_text_is_printable(text: str) -> None:
    assert visible(text).replace("\n", "").isprintable()
    assert quoted(text).isprintable()


@given(st.text(alphabet="ab日本é", max_size=60), st.integers(1, 40))
def test_a_fitted_line_has_at_most_its_columns(text: str, columns: int) -> None:
    line = fitted(text, columns)
    assert cell_len(line) <= columns
    assert line == text or cell_len(text) > columns


def test_a_cut_text_says_how_much_is_missing() -> None:
    text = "begin " + "x" * 5_000 + " end"
    assert cut(text, 10_000) == text
    shown = cut(text, 300)
    assert shown.startswith("begin")
    assert shown.endswith("end")
    assert "4,710 characters" in shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0"),
        (1.0, "1"),
        (0.25, "0.250"),
        (20_000, "20000"),
        (123.456, "123.5"),
        (-0.00001, "-1.0e-05"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_are_short_and_never_pretend_to_be_0(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_only_none_and_all_appear_as_such() -> None:
    assert [share(value) for value in (None, 0.0, 0.125, 0.5, 1.0)] == ["-", "0%", "13%", "50%", "100%"]
    assert share(0.004) not in ("0%", "100%")
    assert share(0.996) not in ("0%", "100%")


def test_white_space_of_a_quoted_text_is_visible() -> None:
    assert quoted(" a\t\n") == '" a\\t\\n"'


def test_a_spread_has_its_extremes() -> None:
    assert spread([0.5, 0.5]) == "0.500"
    assert spread([0.5, -1, 2]) == "-1 to 2"
    assert spread([]) == "-"


def test_a_sparkline_has_a_gap_where_a_number_is_missing() -> None:
    assert sparkline([0, None, 1]) == "▁ █"
    assert sparkline([0, 1], 0, 2) == "▁▅" or sparkline([0, 1], 0, 2) == "▁▄"
    assert sparkline([3, 3]) == "▁▁"
    assert sparkline([0, float("nan"), 1]) == "▁ █"
    assert sparkline([None]) == ""
