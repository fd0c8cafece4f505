"""Tests the first part of `benchmarks.supervised`, on one seed and shorter; `test_local.py` tests the second."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks import supervised


def test_the_entropy_is_that_of_the_grammar(tmp_path: Path) -> None:
    measured = supervised.write_rows(tmp_path / "rows.jsonl", 4000, seed=7)
    assert measured == pytest.approx(supervised.entropy_per_token(), rel=0.01)
    messages, logprob, tokens = supervised.conversation(random.Random(3))
    assert tokens == sum(len(message["content"]) + 1 for message in messages if message["role"] == "assistant")
    assert logprob < 0


@pytest.mark.slow
@pytest.mark.usefixtures("supervised_in_forks")
def test_supervised_training_reaches_the_entropy_of_what_it_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "SFT", supervised.SFT.replace("steps = 280", "steps = 120"))
    row = supervised.learn_grammar(3, tmp_path)
    assert row["nll_before"] > 2 * row["entropy"]
    assert row["nll_after"] < 1.05 * row["entropy"], "half of these steps reach 1.08 times the entropy"
    assert row["nll_after"] > 0.95 * row["entropy"], "nothing can be better than the grammar, but for the rows it drew"
