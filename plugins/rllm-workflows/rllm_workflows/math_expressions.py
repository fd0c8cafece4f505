r"""Compares model-written expressions, in LaTeX or plain text, without executing them as code.

Expressions consist of numbers, variables, ``+ - * / ^``, fractions, roots, logarithms, ``\pi`` and ``e``. Limits apply
to the text, the digits of a number, the nodes of the tree and the size of every power: ``9^{9^{9^9}}`` is rejected
without being computed.

Values are exact fractions if rational, and decimals of 80 digits otherwise. Two expressions are equal if their values
agree at fixed rational points for the variables, wherever both are defined.
"""

from __future__ import annotations

import decimal
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

MAX_CHARACTERS = 512
MAX_DIGITS = 64
MAX_NODES = 200
MAX_DEPTH = 40
MAX_BITS = 8192
POINTS, POINTS_TRIED = 3, 12

_PRECISION = decimal.Context(prec=80, Emax=10_000, Emin=-10_000, traps=[decimal.InvalidOperation, decimal.Overflow])
_TOLERANCE = Decimal("1e-60")
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798")
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,4}(?![0-9A-Za-z]))?|\.[0-9]+)"
    r"|(?P<command>\\[A-Za-z]+)|(?P<name>[A-Za-z](?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]{1,8}\}))?)|(?P<sign>[-+*/^(){}\[\]_]))"
)
_LOGARITHMS = (r"\ln", r"\log")

Value = Fraction | Decimal
Node = tuple[str, *tuple["Node | Fraction | str", ...]]


class UnreadableError(ValueError):
    """Raised for text that is not an allowed expression, or is too large."""


class UndefinedError(ArithmeticError):
    """Raised if an expression has no real value at a point, or one that is too large."""


@dataclass(frozen=True)
class Expression:
    """A checked expression.

    Attributes:
        tree: Tree of operations.
        variables: Names of the variables.
    """

    tree: Node
    variables: frozenset[str]

    def value(self, point: Mapping[str, Fraction]) -> Value:
        """Returns the value at a point.

        Args:
            point: Values of the variables.

        Raises:
            UndefinedError: If the expression has no value there.
        """
        with decimal.localcontext(_PRECISION):
            try:
                return _value(self.tree, point)
            except (ZeroDivisionError, decimal.DecimalException) as error:
                raise UndefinedError(str(error)) from None


def parse(text: str) -> Expression:
    """Checks and parses an expression.

    Raises:
        UnreadableError: If the text is too large or contains anything that is not allowed.
    """
    if len(text) > MAX_CHARACTERS:
        raise UnreadableError(f"longer than {MAX_CHARACTERS} characters")
    parser = _Parser(_tokens(text.rstrip()))
    tree = parser.sum()
    if parser.kind:
        raise UnreadableError(f"unexpected {parser.text}")
    return Expression(tree, frozenset(parser.variables))


def equal(one: Expression, other: Expression) -> bool | None:
    """Returns whether two expressions are equal, or None if they have no values to compare."""
    names = sorted(one.variables | other.variables)
    compared = 0
    for attempt in range(POINTS_TRIED if names else 1):
        # Arbitrary points of both signs without simple relations, where an expression is unlikely to be zero.
        point = {
            name: Fraction(7919 * (position + 1) + 104_729 * attempt, 7 + 2 * attempt) * (-1 if attempt % 3 == 2 else 1)
            for position, name in enumerate(names)
        }
        try:
            first, second = one.value(point), other.value(point)
        except UndefinedError:
            continue
        if not _same(first, second):
            return False
        compared += 1
        if compared == POINTS:
            break
    return True if compared else None


def _same(first: Value, second: Value) -> bool:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    with decimal.localcontext(_PRECISION):
        first, second = _decimal(first), _decimal(second)
        return abs(first - second) <= _TOLERANCE * max(Decimal(1), abs(first), abs(second))


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise UnreadableError(f"unexpected {text[position : position + 10]!r}")
        position = found.end()
        kind = found.lastgroup
        assert kind is not None
        yield kind, found[kind]
    yield "", "end"


class _Parser:
    """Recursive-descent parser: sums of products of signed powers of atoms; adjacent factors are multiplied."""

    def __init__(self, tokens: Iterator[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._nodes = 0
        self._depth = 0
        self.variables: set[str] = set()
        self.kind, self.text = next(tokens)

    def _next(self) -> str:
        text = self.text
        self.kind, self.text = next(self._tokens)
        return text

    def _expect(self, text: str) -> None:
        if self.text != text or self.kind == "":
            raise UnreadableError(f"{text} expected, not {self.text}")
        self._next()

    def _node(self, *parts: Node | Fraction | str) -> Node:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise UnreadableError(f"more than {MAX_NODES} numbers and operators")
        return parts  # type: ignore[return-value]

    def sum(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnreadableError(f"nested more than {MAX_DEPTH} times")
        node = self._product()
        while self.text in ("+", "-"):
            node = self._node(self._next(), node, self._product())
        self._depth -= 1
        return node

    def _product(self) -> Node:
        node = self._signed()
        while True:
            if self.text in ("*", "/"):
                node = self._node(self._next(), node, self._signed())
            elif self.kind in ("command", "name") or self.text in ("(", "{"):
                node = self._node("*", node, self._power())
            else:
                return node

    def _signed(self) -> Node:
        is_negative = False
        while self.text in ("+", "-"):
            is_negative ^= self._next() == "-"
        node = self._power()
        return self._node("-", self._node("number", Fraction(0)), node) if is_negative else node

    def _power(self) -> Node:
        base = self._atom()
        while self.text == "^":
            self._next()
            base = self._node("^", base, self._exponent())
            if self.text == "^":
                raise UnreadableError("a power of a power needs brackets")
        return base

    def _exponent(self) -> Node:
        return self._signed() if self.text in ("+", "-") else self._atom()

    def _atom(self) -> Node:
        if self.kind == "number":
            return self._node("number", _number(self._next()))
        if self.kind == "name":
            name = self._next().replace("{", "").replace("}", "")
            if name == "e":
                return self._node("e")
            self.variables.add(name)
            return self._node("variable", name)
        if self.kind == "command":
            return self._command(self._next())
        for opening, closing in ("()", "{}"):
            if self.text == opening:
                self._next()
                node = self.sum()
                self._expect(closing)
                return node
        raise UnreadableError(f"unexpected {self.text}")

    def _command(self, command: str) -> Node:
        if command == r"\pi":
            return self._node("pi")
        if command == r"\infty":
            self.variables.add(command)
            return self._node("variable", command)
        if command == r"\frac":
            return self._node("/", self._argument(), self._argument())
        if command == r"\sqrt":
            degree = self._node("number", Fraction(2))
            if self.text == "[":
                self._next()
                degree = self.sum()
                self._expect("]")
            return self._node("root", self._argument(), degree)
        if command in _LOGARITHMS:
            base = self._node("e") if command == r"\ln" else self._node("number", Fraction(10))
            if self.text == "_":
                self._next()
                base = self._argument()
            return self._node("log", self._power(), base)
        raise UnreadableError(f"unknown {command}")

    def _argument(self) -> Node:
        r"""Parses a group, or a single character as in LaTeX: ``\frac12`` is a half."""
        if self.kind != "number":
            return self._atom()
        first, rest = self.text[0], self.text[1:]
        if rest:
            self.text = rest
            return self._node("number", _number(first))
        return self._node("number", _number(self._next()))


def _number(text: str) -> Fraction:
    digits, _, exponent = text.lower().partition("e")
    if len(digits) > MAX_DIGITS or abs(int(exponent or 0)) > MAX_DIGITS:
        raise UnreadableError(f"a number has more than {MAX_DIGITS} digits")
    if digits in ("", "."):
        raise UnreadableError("a number has no digits")
    return Fraction(digits.rstrip(".")) * Fraction(10) ** int(exponent or 0)


def _value(node: Node, point: Mapping[str, Fraction]) -> Value:
    match node:
        case ("number", Fraction() as number):
            return number
        case ("variable", str(name)):
            return point[name]
        case ("pi",):
            return _PI
        case ("e",):
            return Decimal(1).exp()
        case (str(operator), tuple(left), tuple(right)):
            return _OPERATIONS[operator](_value(left, point), _value(right, point))
    raise TypeError(f"{node[0]} passed the check of parse()")


def _decimal(value: Value) -> Decimal:
    return value if isinstance(value, Decimal) else Decimal(value.numerator) / Decimal(value.denominator)


def _arithmetic(operation: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:
    def compute(left: Value, right: Value) -> Value:
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            value = operation(left, right)
            assert isinstance(value, Fraction)
            if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
                raise UndefinedError("too large")
            return value
        return operation(_decimal(left), _decimal(right))

    return compute


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        power = exponent.numerator
        if isinstance(base, Decimal):
            return base**power
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(power) > MAX_BITS:
            raise UndefinedError("too large")
        return base**power
    if isinstance(exponent, Fraction) and exponent.denominator <= MAX_DIGITS:
        return _power(_root(base, Fraction(exponent.denominator)), Fraction(exponent.numerator))
    if base <= 0:
        raise UndefinedError("no real power")
    return _decimal(base) ** _decimal(exponent)


def _root(value: Value, degree: Value) -> Value:
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 1 <= degree <= MAX_DIGITS:
        raise UndefinedError("no root of that degree")
    n = degree.numerator
    if value < 0:
        if n % 2 == 0:
            raise UndefinedError("no real root")
        return -_root(-value, degree)
    if isinstance(value, Fraction):
        parts = [_exact_root(part, n) for part in (value.numerator, value.denominator)]
        if parts[0] is not None and parts[1] is not None:
            return Fraction(parts[0], parts[1])
    number = _decimal(value)
    return number.sqrt() if n == 2 else number ** (Decimal(1) / n) if number else Decimal(0)


def _exact_root(number: int, degree: int) -> int | None:
    """Returns the integer root of a number, found by bisection, or None if there is none."""
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    if degree == 2:
        low = high = math.isqrt(number)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if middle**degree >= number else (middle + 1, high)
    return low if low**degree == number else None


def _logarithm(value: Value, base: Value) -> Value:
    if value <= 0 or base <= 0 or base == 1:
        raise UndefinedError("no real logarithm")
    return _decimal(value).ln() / _decimal(base).ln()


_OPERATIONS: dict[str, Callable[[Value, Value], Value]] = {
    "+": _arithmetic(lambda left, right: left + right),  # type: ignore[operator]
    "-": _arithmetic(lambda left, right: left - right),  # type: ignore[operator]
    "*": _arithmetic(lambda left, right: left * right),  # type: ignore[operator]
    "/": _arithmetic(lambda left, right: left / right),  # type: ignore[operator]
    "^": _power,
    "root": _root,
    "log": _logarithm,
}
