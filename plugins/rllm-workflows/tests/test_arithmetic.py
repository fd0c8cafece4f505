from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rllm_workflows.arithmetic import MAX_CHARACTERS, MAX_DIGITS, MAX_NODES, ExpressionError, parse


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7", 7, (7,)),
        ("1 + 2 * 3", 7, (1, 2, 3)),
        ("(1+2)*3", 9, (1, 2, 3)),
        ("1/3 + 1/3 + 1/3", 1, (1, 3, 1, 3, 1, 3)),
        ("-2 * -(3 - 5)", -4, (2, 3, 5)),
        ("--4", 4, (4,)),
        ("10/4", Fraction(5, 2), (10, 4)),
        ("  8\t/ 2\n", 4, (8, 2)),
        ("1 - (2 - (3 - 4))", -2, (1, 2, 3, 4)),
    ],
)
def test_values_are_exact(text, value, numbers):
    expression = parse(text)
    assert expression.value() == value
    assert expression.numbers == numbers


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "9**9**9",
        "2**-1",
        "7//2",
        "7%2",
        "+3",
        "~3",
        "1 if 1 else 2",
        "__import__('os').system('true')",
        "abs(1)",
        "1(2)",
        "(1)(2)",
        "(1, 2)",
        "()",
        "1 2",
        "1.5",
        "1e9",
        "1_000",
        "0x10",
        "007",
        "1j",
        "True",
        "1 == 1",
        "1 < 2",
        "[1]",
        "1; 2",
        "1\n+2",
        "x := 1",
        "lambda: 1",
        "1 + ",
        "((1)",
        "１+２",  # noqa: RUF001
        "٣+٤",
        "²",
        "1\u00a0+ 2",
        "1 × 2",  # noqa: RUF001
        "1\x00",
        "# 1",
        "1 # 2",
    ],
)
def test_everything_else_is_refused(text):
    with pytest.raises(ExpressionError):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "1 +" + " " * MAX_CHARACTERS + "1",
        "1" * (MAX_DIGITS + 1),
        "1" * 1_000_000,
        "(" * 100_000 + "1" + ")" * 100_000,
        "(" * 127 + "1" + ")" * 127 + "+",
        "-" * (MAX_CHARACTERS - 1) + "1",
        "1+" * 127 + "1",
        "*" * MAX_CHARACTERS,
        "9**" * 80 + "9",
        "a" * 10_000_000,
    ],
)
def test_hostile_sizes_are_refused_quickly(text):
    started = time.process_time()
    with pytest.raises(ExpressionError):
        parse(text)
    assert time.process_time() - started < 0.5


def test_what_is_within_the_bounds_is_computed():
    assert parse("9" * MAX_DIGITS).value() == int("9" * MAX_DIGITS)
    terms = MAX_NODES // 2
    assert parse("+".join("1" * terms)).value() == terms
    assert parse("(" * 100 + "1" + ")" * 100).value() == 1
    factors = "*".join(["9" * MAX_DIGITS] * 3)
    assert parse(factors).value() == int("9" * MAX_DIGITS) ** 3


def test_division_by_zero_is_reported_not_hidden():
    with pytest.raises(ZeroDivisionError):
        parse("1/(2-2)").value()


expressions = st.recursive(
    st.integers(0, 99).map(lambda number: (str(number), Fraction(number))),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
        lambda parts: (
            f"({parts[0][0]} {parts[1]} {parts[2][0]})",
            {"+": parts[0][1] + parts[2][1], "-": parts[0][1] - parts[2][1], "*": parts[0][1] * parts[2][1]}[parts[1]],
        )
    ),
    max_leaves=8,
)


@given(expressions)
def test_generated_expressions_have_their_value(case):
    text, value = case
    assert parse(text).value() == value


@given(st.text(alphabet="0123456789+-*/() \t", max_size=300) | st.text(max_size=300))
@example("1/0")
@example("-(" * 60 + "1" + ")" * 60)
def test_any_text_is_an_expression_or_refused(text):
    try:
        expression = parse(text)
    except ExpressionError:
        return
    assert len(text.strip(" \t\r\n")) <= MAX_CHARACTERS
    assert "**" not in text
    try:
        assert isinstance(expression.value(), Fraction)
    except ZeroDivisionError:
        assert "/" in text
