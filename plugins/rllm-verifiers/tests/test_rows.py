"""Splits of a taskset."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from players import workflow
from rllm_verifiers.rows import Rows
from test_loading import taskset

from rllm_core.errors import ConfigError


def test_an_infinite_taskset_is_made_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(Rows, "_task", lambda rows, row, task=Rows._task: made.append(row) or task(rows, row))
    played = workflow("last_letter", validation_size=50)
    train = played.tasks("train")
    assert len(train) == 1_000_000
    assert not made
    assert train[2].task_id == f"last_letter-{made[2].data.idx}"
    assert len(made) == 3
    validation = played.tasks("validation")
    asked = {task.data["row"]["prompt"] for task in validation}
    assert len(asked) == len(validation) == 50
    trained = [task.data["row"]["prompt"] for task in itertools.islice(train, 3000)]
    assert len(set(trained)) < len(trained), "the same may be asked twice"
    assert not asked & set(trained)
    assert train[2999] == train[2999 - len(train)]


def test_two_workers_have_the_same_rows() -> None:
    first, second = (workflow("last_letter", arguments={"seed": 5}).tasks("train") for _ in range(2))
    assert [task.data for task in first[:50]] == [task.data for task in second[:50]]
    other = workflow("last_letter", arguments={"seed": 6}).tasks("train")
    assert other[0].data != first[0].data


def test_questions_are_compared_without_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    load = "return [OwnTask(Data(prompt=word)) for word in ['a', 'b', 'A', 'B ', 'c', 'd', 'C', 'e', 'f', 'g', 'h']]"
    found = taskset(tmp_path, "own_case", load=load)
    assert [task.data["row"]["prompt"] for task in found.tasks("validation")] == ["a", "b"]
    assert [task.data["row"]["prompt"] for task in found.tasks("train")] == ["c", "d", "C", "e", "f", "g", "h"]


def test_games_with_one_prompt_are_compared_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    load = "return [OwnTask(Data(prompt='Guess.', secret=n % 8)) for n in range(20)]"
    found = taskset(tmp_path, "own_game", field="secret: int", load=load)
    assert {task.data["row"]["secret"] for task in found.tasks("validation")} == {0, 1, 2, 3}
    assert {task.data["row"]["secret"] for task in found.tasks("train")} == {4, 5, 6, 7}


def test_sizes(tmp_path: Path) -> None:
    assert len(workflow("ledger").tasks("validation")) == 2
    assert len(workflow("ledger", train_size=3).tasks("train")) == 3
    assert len(workflow("ledger", validation_size=1).tasks("train")) == 11
    assert len(workflow("last_letter", train_size=7).tasks("train")) == 7


def test_an_infinite_taskset_that_ends_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    found = taskset(tmp_path, "own_end", taskset="INFINITE = True")
    train = workflow("ledger").tasks("train")
    assert train
    with pytest.raises(ConfigError, match="ends after"):
        found.tasks("train")[500]


def test_prompts_of_messages_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    load = "return [OwnTask(Data(prompt=[vf.UserMessage(content=word)])) for word in 'abcdef']"
    found = taskset(tmp_path, "own_messages", load=load)
    asked = [task.data["row"]["prompt"][0] for task in found.tasks("train")]
    assert [(message["role"], message["content"]) for message in asked] == [("user", word) for word in "bcdef"]
