"""Reads a judge's reply strictly: by id, and complete or not at all.

Replies with missing, extra, duplicate or malformed scores are not repaired: matching such replies by position would
train a rollout on the reward of another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

NO_TEXT = "there is no text; check base_url, and whether the judge's reasoning needs more than its maximum of tokens"
MAX_BROKEN = 1000
_START = re.compile(r'\{\s*"')  # of an object that is not empty


class Unreadable(ValueError):
    """A reply does not contain what the question asked for."""


@dataclass(frozen=True)
class Graded:
    """A score from 0 to 1, with its reason."""

    score: float
    reason: str = ""


def scores_in(reply: str, ids: Collection[str]) -> dict[str, Graded]:
    """Returns the score of every id from ``{"scores": [{"id": "...", "reason": "...", "score": 0.5}, ...]}``.

    Text around the JSON object is the judge's reasoning. Entries may be in any order and have more fields.

    Args:
        reply: Text of the judge.
        ids: Ids of the question.

    Raises:
        Unreadable: If there is not exactly one such object, or not exactly one score from 0 to 1 for each id.
    """
    entries = _only_object(reply, "scores")["scores"]
    if not isinstance(entries, list):
        raise Unreadable("scores is not a list")
    found: dict[str, Graded] = {}
    for entry in entries:
        if not isinstance(entry, dict):
            raise Unreadable("an entry of scores is not an object")
        named = entry.get("id")
        if not isinstance(named, str) or named not in ids:
            raise Unreadable(f"{named!r:.40} was not asked for")
        if named in found:
            raise Unreadable("an id has two scores")
        found[named] = Graded(_number(entry.get("score"), "a score"), _reason(entry))
    missing = [one for one in ids if one not in found]
    if missing:
        raise Unreadable(f"{len(missing)} of {len(ids)} ids have no score")
    return found


def winner_in(reply: str, ids: Collection[str]) -> str | None:
    """Returns the id in ``{"winner": "..."}``, or None for ``{"winner": null}``: a draw.

    Raises:
        Unreadable: If there is not exactly one such object, or it names no id of the question.
    """
    winner = _only_object(reply, "winner")["winner"]
    if winner is None or (isinstance(winner, str) and winner in ids):
        return winner
    raise Unreadable(f"{winner!r:.40} was not asked for")


def score_in(reply: str) -> Graded:
    """Returns the content of ``{"reason": "...", "score": 0.5}``.

    Raises:
        Unreadable: If there is not exactly one such object, or its score is not a number from 0 to 1.
    """
    found = _only_object(reply, "score")
    return Graded(_number(found["score"], "the score"), _reason(found))


def without_reasoning(reply: str) -> str:
    """Returns a reply without the reasoning in ``<think>...</think>`` that it begins with.

    Later tags are not reasoning: they may be a rollout's, quoted by the judge.

    Raises:
        Unreadable: If the reasoning does not end; an object in it is a draft.
    """
    if not reply.lstrip().startswith("<think>"):
        return reply
    _, ended, answer = reply.partition("</think>")
    if not ended:
        raise Unreadable("<think> does not end; the judge's reasoning needs more than its maximum of tokens")
    return answer


def _number(score: Any, what: str) -> float:
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:  # NaN fails the comparison
        raise Unreadable(f"{what}, {score!r:.40}, is not a number from 0 to 1")
    return float(score)


def _reason(entry: dict[str, Any]) -> str:
    reason = entry.get("reason")
    return reason if isinstance(reason, str) else ""


def _only_object(reply: str, key: str) -> dict[str, Any]:
    """Returns the only JSON object in a reply that has a certain key; objects nested in others do not count."""
    if not reply.strip():
        raise Unreadable(NO_TEXT)
    reply = without_reasoning(reply)
    decoder, found, broken = json.JSONDecoder(), [], 0
    start = _START.search(reply)
    while start is not None:
        place = start.start()
        try:
            value, end = decoder.raw_decode(reply, place)
        except RecursionError:  # a search from every bracket in it would block the run
            raise Unreadable("it is nested too deeply") from None
        except ValueError:
            end, broken = place + 1, broken + 1
            if broken > MAX_BROKEN:  # each costs a search for its line
                raise Unreadable("it has too many broken objects") from None
        else:
            if isinstance(value, dict) and key in value:
                if _doubled(reply[place:end], key):
                    raise Unreadable(f"{key} is there twice")
                found.append(value)
        start = _START.search(reply, end)
    if len(found) != 1:
        raise Unreadable(f"{len(found)} objects with {key} instead of one")
    return found[0]


def _doubled(text: str, key: str) -> bool:
    """Whether an object repeats a key; `json` would keep the last value."""
    doubled = False

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal doubled
        doubled = doubled or len({name for name, _ in items}) < len(items)
        return dict(items)

    json.loads(text, object_pairs_hook=pairs)
    return doubled
