from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError
from rllm_workflows.sort import SortConfig, SortWorkflow, is_held_out, prompt, score

from rllm_core.types import TerminationReason


@pytest.fixture(scope="module")
def workflow():
    return SortWorkflow()


def task_of(workflow, word):
    return next(t for s in ("train", "validation") for t in workflow.tasks(s) if t.data["word"] == word)


def test_splits_cover_all_words_once(workflow):
    ids = [task.task_id for split in ("train", "validation") for task in workflow.tasks(split)]
    assert len(ids) == len(set(ids)) == 8**4
    assert 0.12 < len(workflow.tasks("validation")) / len(ids) < 0.17


def test_answers_are_the_letters_in_order(workflow):
    for task in workflow.tasks("validation"):
        assert task.data["answer"] == "".join(sorted(task.data["word"]))
        assert task.task_id == f"sort-{task.data['word']}"


@pytest.mark.slow
def test_splits_are_the_same_in_another_process(workflow):
    code = (
        "from rllm_workflows.sort import SortWorkflow\n"
        "print(','.join(task.task_id for task in SortWorkflow().tasks('validation')))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert outputs == {",".join(task.task_id for task in workflow.tasks("validation"))}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("abcd", 1.0),
        (" abcd\n", 1.0),
        ("dcba", 0.0),
        ("abdc", 0.25),
        ("acbd", 0.25),
        ("adcb", 0.25),
        ("abca", 0.375),
        ("abc", 0.0),
        ("abcde", 0.0),
        ("", 0.0),
        ("ABCD", 0.0),
    ],
)
def test_rewards(workflow, play, answer, reward):
    episode, engine = play(workflow, task_of(workflow, "dbca"), answer)
    [trajectory] = episode.trajectories
    assert trajectory.total_reward == reward
    assert episode.is_correct is (reward == 1.0)
    assert episode.termination_reason is TerminationReason.DONE
    assert episode.task_id == "sort-dbca"
    assert prompt("dbca") in engine.prompts[0]


def test_an_answer_that_was_cut_off_is_none(workflow, play):
    episode, _ = play(workflow, task_of(workflow, "dbca"), "abcd[cut off]")
    assert episode.trajectories[0].total_reward == 0.0
    assert episode.is_correct is False
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_TOKENS


def test_repeated_letters(workflow):
    assert task_of(workflow, "baba").data["answer"] == "aabb"
    assert score("aabb", "aabb") == 1.0
    assert score("abab", "aabb") == 0.25


def test_the_order_is_that_of_the_alphabet_in_the_section():
    workflow = SortWorkflow(SortConfig(letters="zyx", length=3))
    assert task_of(workflow, "xyz").data["answer"] == "zyx"
    assert sum(len(workflow.tasks(split)) for split in ("train", "validation")) == 27


def test_held_out_words_do_not_depend_on_the_section():
    small = SortWorkflow(SortConfig(letters="abc"))
    assert {t.data["word"] for t in small.tasks("validation")} == {
        t.data["word"] for t in SortWorkflow().tasks("validation") if set(t.data["word"]) <= set("abc")
    }
    assert all(is_held_out(t.data["word"]) for t in small.tasks("validation"))


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"letters": "aab"}, "must be distinct letters or digits"),
        ({"letters": "a b"}, "letters or digits"),
        ({"letters": "a"}, "at least 2"),
        ({"length": 1}, "greater than or equal to 2"),
        ({"length": 10**9}, "less than or equal to 16"),
        ({"length": 6}, "use fewer letters or shorter words"),
        ({"lenght": 3}, "Extra inputs"),
    ],
)
def test_bad_sections(section, complaint):
    with pytest.raises(ValidationError, match=complaint):
        SortConfig(**section)
