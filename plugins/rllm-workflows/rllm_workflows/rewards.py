"""Standard reward functions, for ``dataset`` and any other workflow that selects one by name.

Each function takes a task and the model's text. The task's ``data["answer"]`` is text, a number, or a list of texts,
any of which is correct. Model output is read with bounded patterns and never executed.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

from rllm_core.types import Task
from rllm_workflows.math_answers import LATEX_COMMA, extract, same, stated

RIGHT, WRONG = 1.0, 0.0

Answer = str | int | float | Sequence[str]

# At most 40 digits on either side of the point: no answer needs more, and long numbers take time to compute.
_NUMBER = re.compile(
    r"(?<![0-9^])(?<![0-9]\.)(?<!\^\{)(?<![A-Za-z]_)"  # of another number, an exponent, or an index
    r"[-\u2212]?\$?(?:[0-9](?:[0-9]|,(?=[0-9]{3})){0,40}(?:\.[0-9]{1,40})?|(?<!\.)\.[0-9]{1,40})"
    r"(?:[eE][+-]?[0-9]{1,2}(?![0-9A-Za-z]))?(?:\s?/\s?[0-9]{1,40}(?!\.?[0-9]))?"
)
_LATEX_FRACTION = re.compile(r"\\[dtc]?frac\s?\{\s?(-?[0-9]{1,40})\s?\}\s?\{\s?([0-9]{1,40})\s?\}")
_BOXED = re.compile(r"\\f?box(?:ed)?(?=\s?\{)")
_MARKUP = re.compile(r"[*`$]|\\[()\[\]]|\\(?:text|textbf|mathbf|mathrm)(?=\s?\{)")
_LETTER_ALONE = re.compile(r"[({\[]{0,2}([A-Za-z])[)}\].:]{0,3}")
# "The answer is a ..." and "the answer is I think ..." choose nothing.
_ANSWER_IS = re.compile(
    r"\b(?:answer|(?:choice|option)(?=\s{0,3}(?:is\b|:)))(?:\s{1,3}is\b)?\s{0,3}[:=>]?\s{0,3}(?:(?:choice|option)\s{1,3})?"
    r"[({\[\"']{0,3}(?!(?-i:a|i|I)\s{1,3}(?-i:[a-z]))([A-Z])\b",
    re.IGNORECASE,
)
_IN_PARENTHESES = re.compile(r"\(([A-Z])\)")
_AT_LINE_START = re.compile(r"^\s{0,8}([A-Z])[).]\s", re.MULTILINE)
_ARTICLES = frozenset({"a", "an", "the"})
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(task: Task, text: str) -> float:
    """Returns 1 if the text equals the answer, ignoring surrounding white space; else 0."""
    return RIGHT if text.strip() in (answer.strip() for answer in _answers(task)) else WRONG


def contains(task: Task, text: str) -> float:
    """Returns 1 if the answer occurs in the text as whole words, ignoring case; else 0.

    A text that lists every possible answer also contains the correct one. If the model can do that, use another
    function.
    """
    words = _words(text)
    return RIGHT if any(_is_part(_words(answer), words) for answer in _answers(task)) else WRONG


def numeric(task: Task, text: str) -> float:
    """Returns 1 if the last number in the text exactly equals the last number in the answer; else 0.

    ``1,234.50``, ``1234.5``, ``1.2345e3`` and ``2469/2`` are equal. Answers such as ``... #### 42`` are read as 42.
    """
    given = last_number(text)
    return RIGHT if given is not None and given in map(last_number, _answers(task)) else WRONG


def math(task: Task, text: str) -> float:
    """Returns 1 if the final answer of the text has the same value as the answer; else 0.

    `rllm_workflows.math_answers` finds the final answer and compares it, as in workflow ``math`` without ``symbolic``.
    """
    given = extract(text)
    return RIGHT if given and any(same(given, stated(answer)) for answer in _answers(task)) else WRONG


def multiple_choice(task: Task, text: str) -> float:
    r"""Returns 1 if the text chooses the answer's letter; else 0.

    The choice is the text itself if it is one letter (``B``, ``(b)``, ``**B**``), or else the last ``answer is B``,
    ``answer: B`` or ``\boxed{B}``, or else the last ``(B)``, or else the only letter with which a line starts
    (``B. Paris``). Other letters do not count.
    """
    choice = chosen_letter(text)
    return RIGHT if choice is not None and choice in map(chosen_letter, _answers(task)) else WRONG


def f1(task: Task, text: str) -> float:
    """Returns the F1 score of the words as in SQuAD (arXiv 1606.05250): harmonic mean of precision and recall.

    Case, punctuation and articles are ignored. With several answers, the best score counts.
    """
    return max(_f1(_plain_words(text), _plain_words(answer)) for answer in _answers(task))


def last_number(text: str) -> Fraction | None:
    """Returns the last number in a text, or None if there is none or it divides by zero."""
    found = _NUMBER.findall(LATEX_COMMA.sub(",", _LATEX_FRACTION.sub(r"\1/\2", text)))
    if not found:
        return None
    numerator, _, denominator = re.sub(r"[,$\s]", "", found[-1]).replace("\u2212", "-").partition("/")
    if denominator and int(denominator) == 0:
        return None
    return Fraction(numerator) / int(denominator or 1)


def chosen_letter(text: str) -> str | None:
    """Returns the letter a text chooses, in upper case, or None."""
    text = _MARKUP.sub("", _BOXED.sub("answer:", text)).strip()
    if alone := _LETTER_ALONE.fullmatch(text):
        return alone[1].upper()
    choices = _ANSWER_IS.findall(text) or _IN_PARENTHESES.findall(text) or _only(_AT_LINE_START.findall(text))
    return choices[-1].upper() if choices else None


def _only(letters: list[str]) -> list[str]:
    return letters if len(set(letters)) == 1 else []


def unusable(reward: str, answer: Answer) -> str | None:
    """Returns the reason why a reward function can never reward an answer, or None if it can.

    Args:
        reward: Name of a reward function. Functions of other packages are not checked.
        answer: Answer of the task.
    """
    needs: dict[str, tuple[Callable[[str], object], str]] = {
        "numeric": (last_number, "a number"),
        "math": (stated, "an answer"),
        "multiple_choice": (chosen_letter, "a letter"),
        "contains": (_words, "a word"),
        "f1": (_plain_words, "a word"),
    }
    if reward not in needs:
        return None
    read, wanted = needs[reward]
    without = [text for text in _texts(answer) if read(text) in (None, [], "")]
    return f"{without[0]!r:.60} does not contain {wanted}" if without else None


def _answers(task: Task) -> list[str]:
    return _texts(task.data["answer"])


def _texts(answer: Answer) -> list[str]:
    if isinstance(answer, str | int | float):
        return [str(answer)]
    return [str(text) for text in answer]


def _words(text: str) -> list[str]:
    """Splits text into words; signs and points inside a number belong to the number."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return re.findall(r"-?[0-9]+(?:[.,][0-9]+)*|\w+", folded)


def _is_part(words: list[str], of: list[str]) -> bool:
    return any(of[start : start + len(words)] == words for start in range(len(of) - len(words) + 1))


def _plain_words(text: str) -> list[str]:
    folded = unicodedata.normalize("NFKC", text).casefold().translate(_WITHOUT_PUNCTUATION)
    return [word for word in folded.split() if word not in _ARTICLES]


def _f1(given: list[str], wanted: list[str]) -> float:
    common = (Counter(given) & Counter(wanted)).total()
    return 2 * common / (len(given) + len(wanted)) if common else WRONG
