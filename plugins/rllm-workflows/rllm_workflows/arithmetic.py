"""Arithmetic written by a model, computed without ever executing it.

An expression may hold integers, ``+ - * /``, minus signs and parentheses, nothing else; no power, since ``9**9**9`` is
seven characters that never finish. Its size is bounded before it is parsed, and it is computed in exact fractions.
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

# ASCII only: the parser of Python folds other digits and letters into these.
_ALPHABET = re.compile(r"[0-9+\-*/() \t]+")
_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_DIGITS + 1}}}")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class ExpressionError(ValueError):
    """The text is not an expression of the allowed kind."""


@dataclass(frozen=True)
class Expression:
    """An expression that passed every check.

    Attributes:
        numbers: Its integers, in the order they are written; a minus sign is not part of a number.
    """

    tree: ast.expr
    numbers: tuple[int, ...]

    def value(self) -> Fraction:
        """Its exact value.

        Raises:
            ZeroDivisionError: If it divides by zero.
        """
        return _value(self.tree)


def parse(text: str) -> Expression:
    """Check and parse an expression.

    Raises:
        ExpressionError: If it is too large or holds anything that is not allowed.
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
    return Expression(tree, tuple(numbers))


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise TypeError(f"{type(node).__name__} passed the check of parse()")
