"""Evaluates model-written arithmetic without executing it as code.

An expression may contain integers, ``+ - * /``, minus signs and parentheses. Powers are excluded: ``9**9**9`` has seven
characters and never finishes. The size is checked before parsing, and values are exact fractions.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 256
MAX_DIGITS = 64
MAX_NODES = 100

# ASCII only: Python's parser normalizes other digits and letters to ASCII.
_ALPHABET = re.compile(r"[0-9+\-*/() \t]+")
_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_DIGITS + 1}}}")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class ExpressionError(ValueError):
    """Raised for text that is not an allowed expression."""


@dataclass(frozen=True)
class ArithmeticExpression:
    """A checked expression.

    Attributes:
        numbers: The integers, in order of appearance. A minus sign is not part of a number.
    """

    tree: ast.expr
    numbers: tuple[int, ...]

    def value(self) -> Fraction:
        """Returns the exact value.

        Raises:
            ZeroDivisionError: If the expression divides by zero.
        """
        return _value(self.tree)


def parse(text: str) -> ArithmeticExpression:
    """Checks and parses an expression.

    Raises:
        ExpressionError: If the text is too long or contains anything that is not allowed.
    """
    text = text.strip(" \t\r\n")
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"longer than {MAX_CHARACTERS} characters")
    if not _ALPHABET.fullmatch(text):
        raise ExpressionError("only digits, + - * / and parentheses are allowed")
    if _LONG_NUMBER.search(text):
        raise ExpressionError(f"a number has more than {MAX_DIGITS} digits")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError("not an expression") from error
    numbers: list[int] = []
    waiting: list[ast.expr] = [tree]
    nodes = 0
    while waiting:
        node = waiting.pop()
        nodes += 1
        if nodes > MAX_NODES:
            raise ExpressionError(f"more than {MAX_NODES} numbers and operators")
        match node:
            case ast.Constant(value=int(number)):
                numbers.append(number)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                waiting.append(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                waiting += (right, left)
            case _:
                raise ExpressionError(f"{type(node).__name__} is not allowed")
    return ArithmeticExpression(tree, tuple(numbers))


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise TypeError(f"{type(node).__name__} passed the check of parse()")
