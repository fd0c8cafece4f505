"""Tests that figures of the parsing benchmark are functions of its raw trials. Nothing is timed here."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from benchmarks import parsing, parsing_model, trials


def turn(parser: str, trial: int, number: int, wall: float, reading: float = 0.0) -> dict[str, Any]:
    seconds = {"wall_seconds": wall, "cpu_seconds": wall / 2}
    reads = {"reading_wall_seconds": reading, "reading_cpu_seconds": reading}
    return {"kind": "turn", "parser": parser, "trial": trial, "turn": number, **seconds, **reads}


def conversation(side: str, trial: int, wall: float, reading: float | None = None) -> dict[str, Any]:
    row = {"kind": "conversation", "side": side, "trial": trial, "wall_seconds": wall, "cpu_seconds": wall}
    if reading is not None:
        row |= {"reading_wall_seconds": reading, "reading_cpu_seconds": reading}
    return row


def drift(parser: str, completions: str, turns: int, lost: int, rerendered: int) -> dict[str, Any]:
    counts = {"turns": turns, "completion_tokens": 9, "lost": lost, "lost_rerendered": rerendered, "reasons": {}}
    return {"kind": "drift", "parser": parser, "completions": completions, **counts}


def test_late_turns_are_compared_with_early_ones_of_the_same_conversation() -> None:
    rows = []
    for trial, slow in ((0, 1.0), (1, 10.0)):  # the machine was slow during the second conversation
        for number in range(1, parsing.TURNS + 1):
            rows.append(turn("a", trial, number, slow * (3.0 if number >= 96 else 1.0), reading=slow))
    found = parsing.figures(rows)
    assert found["turn100_over_turn5"] == 2.0  # (3 + 1) / (1 + 1)
    assert found["turn100_over_turn5_by_parser"] == {"a": 2.0}


def test_the_worst_parser_is_the_figure_and_one_slow_turn_is_not() -> None:
    rows = [turn("a", 0, number, 99.0 if number == 100 else 1.0) for number in range(1, 101)]
    rows += [turn("b", 0, number, 2.5 if number > 50 else 1.0) for number in range(1, 101)]
    found = parsing.figures(rows)
    assert found["turn100_over_turn5_by_parser"] == {"a": 1.0, "b": 2.5}
    assert found["turn100_over_turn5"] == 2.5


def test_rerendering_is_compared_pair_by_pair_and_the_slower_parser_counts() -> None:
    rows = []
    for trial, slow in enumerate((1.0, 5.0, 1.0)):
        rows += [conversation("a", trial, slow, reading=slow), conversation("b", trial, 2 * slow, reading=0.0)]
        rows.append(conversation("rerender", trial, 40 * slow))
    found = parsing.figures(rows)
    assert found["rerender_over_bridge_20_turns_by_parser"] == {"a": 40.0, "b": 20.0}
    assert found["rerender_over_bridge_20_turns"] == 20.0
    assert found["rerender_over_bridge_and_reading_20_turns"] == 20.0
    assert "identity_lost_share" not in found


def test_shares_are_of_turns() -> None:
    rows = [drift("a", "text", 30, 0, 3), drift("b", "text", 10, 0, 1), drift("a", "reasoning", 60, 1, 60)]
    found = parsing.figures(rows)
    assert found["identity_lost_share"] == 0.01
    assert found["identity_lost_share_rerendered"] == 0.64
    assert found["identity_lost_share_rerendered_by_completions"] == {"text": 0.1, "reasoning": 1.0}
    assert found["identity_turns"] == 100


def test_ngrams_follow_the_text() -> None:
    ngrams = parsing.Ngrams([1, 2, 3] * 20, openers={2})
    drawn = ngrams.draw(random.Random(0), 50)
    assert drawn[0] == 2
    assert len(drawn) == 50
    assert all(after == before % 3 + 1 for before, after in itertools.pairwise(drawn))


@pytest.mark.slow
def test_a_small_measurement_has_every_figure(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(trials, "ROOT", tmp_path)
    some = parsing_model.corpus()[::20]
    monkeypatch.setattr(parsing_model, "corpus", lambda: some)
    monkeypatch.setattr(parsing, "TURNS", 8)
    monkeypatch.setattr(parsing, "EARLY", range(2, 4))
    monkeypatch.setattr(parsing, "LATE", range(6, 8))
    monkeypatch.setattr(parsing, "SHORT_TURNS", 3)
    parsing.main(["--vocabulary", "1000", "--trials", "1", "--conversations", "1", "--turns", "2"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["identity_lost_share"] == 0 < found["identity_lost_share_rerendered"]
    assert {"turn100_over_turn5", "rerender_over_bridge_20_turns", "vocabulary"} <= found.keys()
    rows = trials.read_rows(trials.raw_path("parsing"))
    assert {row["kind"] for row in rows} == {"conditions", "tokenizer", "turn", "conversation", "drift"}
