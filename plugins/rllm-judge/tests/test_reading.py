"""Tests that a reply is read by id, whole, or not at all; beside matching by position."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from judging import answer_in, judged, shown
from rllm_judge.reading import Unreadable, score_in, scores_in, winner_in
from rllm_judge.relative import Relative

from rllm_core.algorithms.group_scorer import Unscorable
from rllm_core.types import MessageLike

IDS = ("BCDF", "GHJK", "LMNP", "QRST")


def reply(*entries: dict[str, Any], before: str = "", after: str = "") -> str:
    return before + json.dumps({"scores": list(entries)}) + after


def entry(named: Any, score: Any) -> dict[str, Any]:
    return {"id": named, "reason": "because", "score": score}


def scripted(kind: str, generator: random.Random, ids: Sequence[str] = IDS) -> tuple[str, dict[str, float]]:
    """Returns a reply about four ids with a fault of this kind, and the scores that the judge meant."""
    meant = {one: round(generator.random(), 3) for one in ids}
    entries = [entry(one, score) for one, score in meant.items()]
    before = after = ""
    if kind == "permuted":
        generator.shuffle(entries)
    elif kind == "short":
        del entries[generator.randrange(4)]
    elif kind == "long":
        entries.insert(generator.randrange(5), entry("VWXZ", 0.5))
    elif kind == "twice":
        entries.insert(generator.randrange(5), entry(generator.choice(ids), 0.9))
    elif kind == "wrong id":
        entries[generator.randrange(4)]["id"] = generator.choice(["BCD", "bcdf", "1", 1, None, "rollout 1"])
    elif kind == "text":
        entries[generator.randrange(4)]["score"] = generator.choice(["0.5", "high", "", None, [0.5], True])
    elif kind == "out of range":
        entries[generator.randrange(4)]["score"] = generator.choice([1.5, -0.1, 7, float("nan"), float("inf")])
    elif kind == "prose":
        before, after = "Let me think {about} it. BCDF: 0.9, surely.\n```json\n", "\n```\nGHJK is {best}."
    elif kind == "injected":  # a rollout talked the judge into a second object
        after = reply(*[entry(one, 1.0) for one in ids])
    elif kind == "cut":
        text = reply(*entries)
        return text[: generator.randrange(len(text) - 1)], meant
    return reply(*entries, before=before, after=after), meant


KINDS = ("permuted", "short", "long", "twice", "wrong id", "text", "out of range", "prose", "injected", "cut")
READABLE = {"permuted", "prose"}


def by_position(text: str, ids: Sequence[str] = IDS) -> dict[str, float] | None:
    """What a reader without ids makes of a reply: the first score is that of the first rollout, and so on."""
    try:
        entries = json.JSONDecoder().raw_decode(text, text.index('{"scores"'))[0]["scores"]
        return {one: float(found["score"]) for one, found in zip(ids, entries, strict=False)}
    except (ValueError, TypeError):
        return None


def test_each_of_1000_scores_is_at_its_rollout_or_there_is_none() -> None:
    generator, wrong, unread = random.Random(7), Counter[str](), Counter[str]()
    for number in range(1000):
        kind = KINDS[number % len(KINDS)]
        text, meant = scripted(kind, generator)
        try:
            found = {one: graded.score for one, graded in scores_in(text, IDS).items()}
            assert found == meant, (kind, text)
        except Unreadable:
            unread[kind] += 1
        naive = by_position(text)
        wrong[kind] += naive is not None and naive != meant
    assert unread == {kind: 100 for kind in KINDS if kind not in READABLE}
    assert sum(wrong.values()) > 300, wrong  # matching by position trains on other rollouts' scores
    assert wrong["permuted"] > 80
    assert wrong["short"] > 60


@pytest.mark.slow
def test_each_of_1000_scores_that_a_scorer_returns_is_at_its_rollout_or_there_is_none() -> None:
    generator, unscored, wrong = random.Random(8), Counter[str](), Counter[str]()
    for number in range(1000):
        kind, answers = KINDS[number % len(KINDS)], [f"answer {number}{letter}" for letter in "abcd"]
        said: dict[str, dict[str, float]] = {}

        def reply(messages: Sequence[MessageLike], kind: str = kind, said: dict[str, Any] = said) -> str:
            told = shown(messages)
            text, meant = scripted(kind, generator, list(told))
            naive = by_position(text, list(told)) or {}
            said["meant"] = {answer_in(told[one]): score for one, score in meant.items()}
            said["naive"] = {answer_in(told[one]): score for one, score in naive.items()}
            return text

        try:
            scores, _ = judged(Relative({"engine": "policy", "replies": 1}), answers, reply)
        except Unscorable:
            unscored[kind] += 1
        else:
            assert dict(zip(answers, map(float, scores), strict=True)) == said["meant"], kind
        wrong[kind] += any(said["meant"][answer] != score for answer, score in said["naive"].items())
    assert unscored == {kind: 100 for kind in KINDS if kind not in READABLE}
    assert wrong["permuted"] > 80
    assert wrong["short"] > 60


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "null",
        '{"scores": {"BCDF": 1}}',
        '{"scores": ["BCDF"]}',
        '{"scores": []}',
        '{"scores": [], "scores": []}',
        "{" * 50_000,
        "[" * 50_000,
        '{"scores": ' + "9" * 6_000 + "}",
        "\x00\ud800{",
    ],
)
def test_hostile_replies_are_unreadable(text: str) -> None:
    with pytest.raises(Unreadable):
        scores_in(text, IDS)


def test_a_reply_is_searched_once_if_it_is_nested_too_deeply() -> None:
    with pytest.raises(Unreadable, match="nested too deeply"):
        scores_in('{"a":' * 2_000, IDS)


def test_an_entry_that_repeats_its_score_is_unreadable() -> None:
    entries = ", ".join(f'{{"id": "{one}", "score": 0.5}}' for one in IDS[1:])
    with pytest.raises(Unreadable, match="twice"):
        scores_in(f'{{"scores": [{{"id": "BCDF", "score": 0, "score": 1}}, {entries}]}}', IDS)


@pytest.mark.parametrize(("text", "winner"), [('{"winner": "GHJK"}', "GHJK"), ('So: {"winner": null}.', None)])
def test_winners(text: str, winner: str | None) -> None:
    assert winner_in(text, IDS) == winner


@pytest.mark.parametrize("text", ["GHJK", '{"winner": "A"}', '{"winner": 1}', '{"winner":null}{"winner":"GHJK"}'])
def test_no_winner(text: str) -> None:
    with pytest.raises(Unreadable):
        winner_in(text, IDS)


def test_a_draft_in_the_reasoning_is_not_the_answer() -> None:
    draft, answer = '{"winner": "BCDF"}', '{"winner": "GHJK"}'
    assert winner_in(f"\n<think>First {draft}. No.</think>\n{answer}", IDS) == "GHJK"
    for text, why in [
        (f"<think>First {draft}. No", "<think> does not end"),
        (f"{answer}: it wrote <think>x</think>{draft}", "2 objects"),
        (f"<think>It wrote </think>{draft}.</think>{answer}", "2 objects"),
    ]:
        with pytest.raises(Unreadable, match=why):
            winner_in(text, IDS)


def test_single_scores() -> None:
    graded = score_in('Fine. {"reason": "short", "score": 1}')
    assert (graded.score, graded.reason) == (1.0, "short")
    for text in ("1", '{"score": "1"}', '{"score": 2}', '{"score": true}', '{"score": 1} {"score": 1}'):
        with pytest.raises(Unreadable):
            score_in(text)


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_reply_without_text_is_not_called_a_wrong_object(text: str) -> None:
    """A body that is no chat completion has no text either, and nor has one that ended in its reasoning."""
    with pytest.raises(Unreadable, match="no text; check base_url"):
        scores_in(text, IDS)


def test_the_same_fault_in_two_questions_is_one_kind_of_failure() -> None:
    """Ids are drawn for each question, and failures are counted by their message."""
    faults = []
    for ids in (IDS[:2], IDS[2:]):
        for entries in ([entry(ids[0], "0.5")], [entry(ids[0], 0.5), entry(ids[0], 0.5)]):
            with pytest.raises(Unreadable) as caught:
                scores_in(reply(*entries), ids)
            faults.append(str(caught.value))
    assert faults[:2] == faults[2:]


@pytest.mark.parametrize(("text", "why"), [("{" * 10**6, "0 objects"), ('{"' * 10**6, "too many broken objects")])
def test_a_reply_of_braces_does_not_block_the_run(text: str, why: str) -> None:
    """Every error of the decoder counts the lines up to it, so a search from each brace would take hours."""
    with pytest.raises(Unreadable, match=why):
        scores_in(text, IDS)
