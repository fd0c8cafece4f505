"""Standard reward functions, for workflow ``dataset`` and for any other that asks for one by name.

Each takes a task, whose ``data["answer"]`` is a text, a number or a list of texts of which any is right, and the text
of the model. Texts of the model are read with bounded patterns and never executed.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

from rllm_core.types import Task

RIGHT, WRONG = 1.0, 0.0

Answer = str | int | float | Sequence[str]

# No more than 40 digits on either side of the point: more is nobody's answer, and costs time to compute with.
_NUMBER = re.compile(r"(?<![0-9.])-?[0-9](?:[0-9]|,(?=[0-9]{3})){0,40}(?:\.[0-9]{1,40})?(?:/[0-9]{1,40}(?![0-9.]))?")
_LETTER_ALONE = re.compile(r"[(\[]?([A-Za-z])[)\].:]{0,2}")
_ANSWER_IS = re.compile(r"\banswer(?: is)?\s{0,3}[:=]?\s{0,3}[(\[]?([A-Z])\b", re.IGNORECASE)
_IN_PARENTHESES = re.compile(r"\(([A-Z])\)")
_ARTICLES = frozenset({"a", "an", "the"})
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(task: Task, text: str) -> float:
    """1 if the text is the answer, white space around it aside; else 0."""
    return RIGHT if text.strip() in (answer.strip() for answer in _answers(task)) else WRONG


def contains(task: Task, text: str) -> float:
    """1 if the answer occurs in the text as whole words, whatever their case; else 0.

    A text that lists every possible answer contains the right one too: where that is possible, use another function.
    """
    words = _words(text)
    return RIGHT if any(_is_part(_words(answer), words) for answer in _answers(task)) else WRONG


def numeric(task: Task, text: str) -> float:
    """1 if the last number in the text equals the last number in the answer, exactly; else 0.

    ``1,234.50``, ``1234.5`` and ``2469/2`` are equal. Answers such as ``... #### 42`` are read as 42.
    """
    given = last_number(text)
    return RIGHT if given is not None and given in map(last_number, _answers(task)) else WRONG


def multiple_choice(task: Task, text: str) -> float:
    """1 if the text chooses the answer's letter; else 0.

    A choice is a text of one letter (``B``, ``(b)``, ``B.``), else the last ``answer is B`` or ``answer: B`` in it,
    else the last ``(B)``. A letter in running text is no choice.
    """
    choice = chosen_letter(text)
    return RIGHT if choice is not None and choice in map(chosen_letter, _answers(task)) else WRONG


def f1(task: Task, text: str) -> float:
    """Overlap of the words of text and answer as in SQuAD (arXiv 1606.05250): harmonic mean of precision and recall.

    Without case, punctuation and articles; with several answers, the best of them.
    """
    return max(_f1(_plain_words(text), _plain_words(answer)) for answer in _answers(task))


def last_number(text: str) -> Fraction | None:
    """The last number in a text; None if there is none, or one divided by zero."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    numerator, _, denominator = found[-1].replace(",", "").partition("/")
    if denominator and int(denominator) == 0:
        return None
    return Fraction(numerator) / int(denominator or 1)


def chosen_letter(text: str) -> str | None:
    """The letter that a text chooses, as a capital; None if it chooses none."""
    alone = _LETTER_ALONE.fullmatch(text.strip())
    if alone:
        return alone[1].upper()
    choices = _ANSWER_IS.findall(text) or _IN_PARENTHESES.findall(text)
    return choices[-1].upper() if choices else None


def unusable(reward: str, answer: Answer) -> str | None:
    """What keeps one of these functions from ever giving a reward for an answer; None if nothing does.

    Args:
        reward: Name of a reward function; of others than these, nothing is known.
        answer: The task's.
    """
    needs: dict[str, tuple[Callable[[str], object], str]] = {
        "numeric": (last_number, "a number"),
        "multiple_choice": (chosen_letter, "a letter"),
        "contains": (_words, "a word"),
        "f1": (_plain_words, "a word"),
    }
    if reward not in needs:
        return None
    read, wanted = needs[reward]
    without = [text for text in _texts(answer) if read(text) in (None, [])]
    return f"{without[0]!r:.60} does not contain {wanted}" if without else None


def _answers(task: Task) -> list[str]:
    return _texts(task.data["answer"])


def _texts(answer: Answer) -> list[str]:
    if isinstance(answer, str | int | float):
        return [str(answer)]
    return [str(text) for text in answer]


def _words(text: str) -> list[str]:
    """Letters and digits in unbroken runs; a sign or a point between digits belongs to the number."""
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
