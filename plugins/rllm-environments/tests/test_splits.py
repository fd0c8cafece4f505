from __future__ import annotations

import pytest
from rllm_environments.splits import Ranges, TooFewQuestions, is_held_out


def test_case_and_white_space_do_not_change_the_split():
    words = [f"Spell this: word{number}" for number in range(200)]
    assert [is_held_out(word) for word in words] == [is_held_out(f" {word.upper()}\n") for word in words]
    assert 20 < sum(map(is_held_out, words)) < 60


@pytest.mark.parametrize("questions", [7, 40, 100_000])
def test_no_question_is_in_both_splits_however_few_there_are(questions):
    ranges = Ranges(300, 50)

    def question_at(index):
        return f"{'Q' if index % 2 else 'q'}{index * 7919 % questions}"

    asked = {
        "train": [ranges.find("train", number, question_at) for number in range(300)],
        "validation": [ranges.find("validation", number, question_at) for number in range(50)],
    }
    texts = {split: {question.casefold() for _, question in found} for split, found in asked.items()}
    assert texts["train"]
    assert texts["validation"]
    assert not texts["train"] & texts["validation"]
    assert all(0 <= index < ranges.size for found in asked.values() for index, _ in found)
    assert max(index for index, _ in asked["validation"]) < min(index for index, _ in asked["train"])


def test_tasks_of_many_questions_rarely_repeat_one():
    ranges = Ranges(2000, 200)
    for split, tasks in (("train", 2000), ("validation", 200)):
        found = {ranges.find(split, number, str)[0] for number in range(tasks)}
        assert len(found) > 0.9 * tasks


def test_a_split_without_questions_is_an_error():
    with pytest.raises(TooFewQuestions, match="1 different questions"):
        [Ranges(10, 10).find(split, 0, lambda index: "the only question") for split in ("train", "validation")]


def test_an_index_without_a_question_is_passed_over():
    ranges = Ranges(10, 4)
    first, *_ = ranges.indices("train", 3)
    questions = {index: f"question {index}" for index in range(ranges.size)}
    found = ranges.find("train", 3, lambda index: None if index == first else questions[index])
    assert found[0] != first
    assert found[1] == questions[found[0]]
    with pytest.raises(TooFewQuestions):
        ranges.find("train", 3, lambda index: None)
