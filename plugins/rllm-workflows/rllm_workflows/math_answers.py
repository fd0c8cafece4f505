r"""Extracts and compares final answers.

The answer is the content of the last complete ``\boxed{...}``, or else the rest of the line after the last ``####``,
or else the last number.

Two answers are equal if they have the same value in any notation (see `rllm_workflows.math_expressions`): integers,
decimals, fractions, percentages, mixed numbers, powers of ten, millions, roots, simple expressions. Lists and sets are
compared in any order, points and intervals part by part, including brackets. Words, relations and other answers
without a value are compared as text, ignoring spaces, fonts and case; more than three letters in a row are a word, not
a product. Letters such as ``A`` may differ in case. Nothing is rounded: a third is not 0.333.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product

from rllm_workflows.math_expressions import MAX_CHARACTERS, Expression, UnreadableError, equal, parse

MAX_BOXES = 20
MAX_BOX_CHARACTERS = 2 * MAX_CHARACTERS
MAX_PARTS = 50
MAX_NESTING = 10
MAX_LETTERS = 3

_BOX = re.compile(r"\\f?boxed\b\s*")
_AFTER_HASHES = re.compile(r"####([^\n]*)")
_INTEGER = re.compile(r"(?:0|-?[1-9][0-9]{0,14})")
_NUMBERS = re.compile(
    r"[-\u2212]?\\[dtc]?frac\s?\{[^{}]{1,100}\}\s?\{[^{}]{1,100}\}|(?<![\w.^])(?<!\^\{)[-\u2212]?\$?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]{1,3}(?![0-9A-Za-z]))?(?:\s?/\s?[0-9]+(?!\.?[0-9]))?(?:\s?\\?%)?"
)
LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\!|\\,)(?=[0-9]{3})")
_REPLACED = (
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![A-Za-z])"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    # Fullwidth commas always separate thousands, never the parts of a list.
    (re.compile(r"\{,\}|,\\!\s?"), "\N{FULLWIDTH COMMA}"),
    (re.compile(r"(?<=[0-9])(?:\\[,!;: ]|[~\xa0\u2009\u202f])(?=[0-9]{3}(?![0-9]))"), "\N{FULLWIDTH COMMA}"),
    (re.compile(r"(?<=[0-9]) (?=[0-9]{3}(?![0-9]|\s*/))"), "\N{FULLWIDTH COMMA}"),
    (re.compile(r"(?<!\\)\\[()\[\]]|\$|£|€|\\\$"), ""),
    (re.compile(r"(?<!\\)\\[,;:! ]|~|\\q?quad(?![A-Za-z])"), " "),  # Two backslashes end a row of a matrix.
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])|°"), ""),
    (re.compile(r"\\(?:cdot|times)(?![A-Za-z])|[\u00b7\u00d7\u2219\u22c5]"), "*"),
    (re.compile(r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)"), "*"),
    (re.compile(r"\\div(?![A-Za-z])|\u00f7"), "/"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"[\u2212\u2013]"), "-"),
    (re.compile(r"π|(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"∞"), r"\\infty "),
    (re.compile(r"(?:√|(?<![\\A-Za-z])sqrt)\s*([0-9.]+)"), r"\\sqrt{\1}"),
    (re.compile(r"√|(?<![\\A-Za-z])sqrt(?=\s*[({])"), r"\\sqrt"),
    (re.compile(r"(?<![\\A-Za-z])(ln|log|sin|cos|tan)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"_\{(\w)\}"), r"_\1"),
    (re.compile(r"±"), r"\\pm "),
    (re.compile(r"\u222a"), r"\\cup "),
    (re.compile(r"(?<=\S)\s*(?:≈|\\approx(?![A-Za-z])).*"), ""),  # A value may be followed by its rounded form.
    (re.compile(r"≠|\\neq?(?![A-Za-z])"), r"\\ne "),
    (re.compile(r"≤|\\leq?(?:slant)?(?![A-Za-z])"), r"\\le "),
    (re.compile(r"≥|\\geq?(?:slant)?(?![A-Za-z])"), r"\\ge "),
)
_FONT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathbb|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?<=[0-9)}%])\s*(?:\\(?:text|textrm|mathrm|mbox)\s*\{(?P<set>[^{}]*)\}|\s(?P<word>[A-Za-z][A-Za-z/ ]*?))"
    r"(?:\s*\^\s*(?:\{[0-9]\}|[0-9]))?$"
)
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"(?<=[0-9])(\s*\\(?:text|mathrm)\s*\{{)?\s*({'|'.join(_SCALES)})(?![A-Za-z])")
_WORD = re.compile(rf"(?<![\\A-Za-z])[A-Za-z]{{{MAX_LETTERS + 1}}}")
_NAME = (
    r"(?:[A-Z]{2,3}|[A-Za-z]|\\angle\s*[A-Z]+|\\(?:text|mathrm|overline)\s*\{[^{}]*\}|\\[A-Za-z]+)"
    r"(?:_(?:\w|\{\w{1,8}\}))?(?:\s*\^\s*\{-1\})?(?:\s*\(\w{1,8}\))?"
)
_NAME_IS = re.compile(rf"^\s*{_NAME}\s*(?:=(?!.*[=<>])|\\in(?![A-Za-z]))")
_CHOICE = re.compile(r"(?:\\[a-z]+\s*\{\s*)?\(([A-H])\)(?:\s*\}\s*|\s+)([^(^+*/=].*)")
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_MIXED = re.compile(r"^(-?)\s*([0-9]+)(?:\s*(\\frac.*)|\s+([0-9]+\s*/\s*[0-9]+))$")
_OPENING, _CLOSING = "([{", ")]}"


def extract(text: str) -> str | None:
    r"""Returns the final answer in a text, or None if there is none."""
    for box in reversed(list(_BOX.finditer(text))[-MAX_BOXES:]):
        content = _group(text, box.end())
        if content is not None:
            return content.strip()
    if hashes := _AFTER_HASHES.findall(text):
        return str(hashes[-1]).strip() or None
    numbers = _NUMBERS.findall(LATEX_COMMA.sub(",", text))
    return str(numbers[-1]).strip() if numbers else None


def stated(answer: str) -> str:
    r"""Returns the answer from a dataset field, which may contain a whole solution with ``\boxed`` or ``####``."""
    if _BOX.search(answer) or "####" in answer:
        return extract(answer) or ""
    return answer.strip()


def same(given: str, wanted: str) -> bool:
    """Returns whether two answers are equal."""
    return compare(given, wanted) is True


def compare(given: str, wanted: str) -> bool | None:
    """Returns whether two answers are equal, or None if one has no value and their texts differ.

    Of a choice with its text, ``(B) 12``, either may be wanted.
    """
    if len(given) > MAX_CHARACTERS:
        return False
    given, wanted = _cleaned(given), _cleaned(wanted)
    if not given or not wanted:
        return False
    if given == wanted:
        return True
    if (choice := _CHOICE.fullmatch(given)) and any(_compared(one, wanted, MAX_NESTING) for one in choice.groups()):
        return True
    return _compared(given, wanted, MAX_NESTING)


def is_plain(answer: str) -> bool:
    """Returns whether an answer is an integer in canonical form, so that comparing texts is enough."""
    return _INTEGER.fullmatch(answer) is not None


def _group(text: str, start: int) -> str | None:
    """Returns the content of the braces at ``start``, or the character there; None if the braces do not close soon."""
    if text[start : start + 1] != "{":
        return text[start : start + 1] or None
    depth = 0
    for position in range(start, min(len(text), start + MAX_BOX_CHARACTERS)):
        if text[position] in "{}" and text[position - 1] != "\\":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return text[start + 1 : position]
    return None


def _cleaned(answer: str) -> str:
    """Normalizes notation."""
    for pattern, replacement in _REPLACED:
        answer = pattern.sub(replacement, answer)
    answer = _SCALE.sub(lambda found: f"*10^{{{_SCALES[found[2]]}}}{found[1] or ''}", answer)
    answer = _NAME_IS.sub("", _without_end(answer)).strip()
    while whole := _FONT.fullmatch(answer):
        answer = _without_end(whole[1])
    return answer


def _without_end(answer: str) -> str:
    return answer.strip().rstrip(".,;").strip()


def _compared(given: str, wanted: str, nesting: int) -> bool | None:
    if nesting == 0:
        return None
    parts_given, parts_wanted = _parts(given), _parts(wanted)
    if parts_given is None and parts_wanted is None:
        return _compared_values(given, wanted)
    if parts_given is None or parts_wanted is None or parts_given[0] != parts_wanted[0]:
        return False
    brackets, many = parts_given
    _, wanted_many = parts_wanted
    if len(many) != len(wanted_many):
        return False
    if brackets in ("list", "union", "{}"):
        return _compared_in_any_order(many, wanted_many, nesting - 1)
    verdicts = [_compared(one, other, nesting - 1) for one, other in zip(many, wanted_many, strict=True)]
    return False if False in verdicts else None if None in verdicts else True


def _compared_in_any_order(given: Sequence[str], wanted: Sequence[str], nesting: int) -> bool | None:
    left = list(given)
    for one in wanted:
        verdicts = [_compared(other, one, nesting) for other in left]
        if True not in verdicts:
            return None if None in verdicts else False
        del left[verdicts.index(True)]
    return True


def _parts(answer: str) -> tuple[str, Sequence[str]] | None:
    r"""Returns the brackets and parts of a collection, or None if the answer is a single value."""
    answer = answer.strip()
    union = _split(answer, r"\cup")
    if len(union) > 1:
        return "union", union
    listed = _split(re.sub(r"\\text\s*\{\s*(and|or)\s*\}|\b(and|or)\b", ",", _ungrouped(answer)), ",")
    listed = _without_common_name([part for part in listed if part.strip()])
    if len(listed) > 1:
        return "list", listed
    if answer.count(r"\pm") == 1:
        return "list", [answer.replace(r"\pm", sign) for sign in "+-"]
    inside = answer.replace(r"\{", "{").replace(r"\}", "}")
    if inside and inside[0] in _OPENING and inside[-1] in _CLOSING and len(inside) > 1:
        is_set = answer.startswith(r"\{")
        many = _split(inside[1:-1], ",")
        if len(many) > 1 or is_set:
            return inside[0] + inside[-1], many
    return None


def _without_common_name(parts: list[str]) -> list[str]:
    """Returns ``3`` and ``-1`` for ``x = 3`` and ``x = -1``, and other parts as they are."""
    names = {"".join(found[0].split()) if (found := _NAME_IS.match(part)) else "" for part in parts}
    return [_NAME_IS.sub("", part) for part in parts] if len(names) == 1 else parts


def _ungrouped(answer: str) -> str:
    """Removes commas that group digits; in points, intervals and sets, a comma separates parts."""
    if any(bracket in answer for bracket in ("(", "[", r"\{")) or answer.startswith("{"):
        return answer
    return _GROUPED.sub(lambda found: found[0].replace(",", ""), answer)


def _split(text: str, separator: str) -> list[str]:
    """Splits at separators outside all brackets; text with more than `MAX_PARTS` parts stays whole."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        if text[position] in _OPENING:
            depth += 1
        elif text[position] in _CLOSING:
            depth -= 1
        elif depth == 0 and text.startswith(separator, position):
            parts.append(text[start:position])
            position += len(separator)
            start = position
            continue
        position += 1
    parts.append(text[start:])
    return parts if len(parts) <= MAX_PARTS else [text]


def _compared_values(given: str, wanted: str) -> bool | None:
    text_given, text_wanted = _text(given), _text(wanted)
    letters_given, letters_wanted = text_given.strip("()"), text_wanted.strip("()")
    if letters_given.isalpha() and letters_wanted.isalpha():
        is_word = max(len(letters_given), len(letters_wanted)) > MAX_LETTERS
        if is_word or letters_given == letters_wanted:
            return letters_given == letters_wanted
    readings_given, readings_wanted = _readings(given), _readings(wanted)
    if readings_given is None or readings_wanted is None:
        return True if text_given == text_wanted != "" else None
    (unit_given, values), (unit_wanted, wanted_values) = readings_given, readings_wanted
    if unit_given and unit_wanted and unit_given != unit_wanted:
        return False
    # Of two percentages, the same reading counts: 50 % is not 0.5 %.
    is_same_notation = len(values) == len(wanted_values)
    pairs = zip(values, wanted_values, strict=True) if is_same_notation else product(values, wanted_values)
    verdicts = [equal(one, other) for one, other in pairs]
    return True if True in verdicts else None if None in verdicts else False


def _readings(answer: str) -> tuple[str, Sequence[Expression]] | None:
    """Returns the unit of a value ("" if none) and its possible readings: a percent sign may divide by 100 or not."""
    answer = _ungrouped(answer.strip()).replace("\N{FULLWIDTH COMMA}", "")
    unit = ""
    if found := _UNIT.search(answer):
        unit = "".join((found["set"] or found["word"] or "").lower().split()).removesuffix("s")
        answer = answer[: found.start()]
    if _WORD.search(answer):
        return None
    is_percent = answer.endswith("%")
    answer = answer.removesuffix("%").removesuffix("\\")
    if mixed := _MIXED.match(answer):
        sign, whole, fraction = mixed[1], mixed[2], mixed[3] or mixed[4]
        answer = f"{sign}({whole}+{fraction})"
    forms = [answer, f"({answer})/100"] if is_percent else [answer]
    try:
        return unit, [parse(form) for form in forms]
    except UnreadableError:
        return None


def _text(answer: str) -> str:
    """Returns an answer without fonts, spaces and case, for comparison as text."""
    return "".join(_FONT.sub(r"\1", answer).replace("\N{FULLWIDTH COMMA}", ",").split()).casefold()
