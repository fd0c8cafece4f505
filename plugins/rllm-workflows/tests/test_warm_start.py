from __future__ import annotations

import random
from collections import Counter
from itertools import islice, pairwise, zip_longest

import pytest
from rllm_workflows import calculator, warm_start
from rllm_workflows.calculator import CalculatorWorkflow
from rllm_workflows.guess import GuessConfig, feedback, parse_guess
from rllm_workflows.sort import SortConfig, is_held_out


@pytest.fixture(scope="module")
def examples():
    return list(islice(warm_start.conversations(random.Random(7)), 20_000))


@pytest.fixture(scope="module")
def sorts(examples):
    words = [m for m in examples if m[0]["content"].startswith("sort: ")]
    return [(asked["content"].removeprefix("sort: "), said["content"]) for asked, said in words]


@pytest.fixture(scope="module")
def guesses(examples):
    return [conversation for conversation in examples if conversation[0]["content"] == "1-5?"]


@pytest.fixture(scope="module")
def calculations(examples):
    """Returns the question's numbers and word, the tool, a, b, the result and the answer."""
    found = []
    for asked, called, returned, answered in (m for m in examples if len(m) == 4 and m[2]["role"] == "tool"):
        first, word, second = asked["content"].split()
        [call] = called["tool_calls"]
        a, b = call["function"]["arguments"].values()
        said, answer = returned["content"], answered["content"]
        found.append((int(first), word, int(second), call["function"]["name"], a, b, said, answer))
    return found


def test_equal_seeds_give_equal_conversations(examples):
    assert list(islice(warm_start.conversations(random.Random(7)), 100)) == examples[:100]
    assert list(islice(warm_start.conversations(random.Random(8)), 100)) != examples[:100]


def test_the_mixture(examples, sorts, guesses, calculations):
    assert len(sorts) + len(guesses) + len(calculations) == len(examples)
    assert 0.38 < len(sorts) / len(examples) < 0.42
    assert 0.38 < len(calculations) / len(examples) < 0.42


def test_sort_never_shows_a_held_out_word(sorts):
    assert not any(is_held_out(word) for word, _ in sorts)
    assert {letter for word, _ in sorts for letter in word} == set(SortConfig().letters)


def test_sort_answers_are_uniform_permutations(sorts):
    different = [(word, answer) for word, answer in sorts if len(set(word)) == 4]
    assert all(sorted(word) == sorted(answer) for word, answer in sorts)
    ranks = Counter(tuple(sorted(word).index(letter) for letter in answer) for word, answer in different)
    assert len(ranks) == 24
    expected = len(different) / 24
    chi_squared = sum((count - expected) ** 2 / expected for count in ranks.values())
    assert chi_squared < 49.7  # 0.999 quantile with 23 degrees of freedom.


def is_played_with(secret, conversation):
    echo = ""
    for turn, (answer, said) in enumerate(zip_longest(conversation[1::2], conversation[2::2]), start=1):
        guess = parse_guess(answer["content"], echo)
        if guess is None or (said is None) != (guess == secret or turn == GuessConfig().turns):
            return False
        if said is not None and said["content"] != feedback(guess, secret):
            return False
        echo = "" if said is None else f"{guess}{said['content']}"
    return True


def test_guess_conversations_are_valid_games(guesses):
    for conversation in guesses:
        assert any(is_played_with(secret, conversation) for secret in range(1, 6))


def test_guesses_ignore_what_was_said(guesses):
    after: dict[str, Counter[int]] = {"": Counter(), "higher": Counter(), "lower": Counter()}
    for conversation in guesses:
        first, *rest = [m["content"] for m in conversation if m["role"] == "assistant"]
        after[""][int(first)] += 1
        for answer in rest:
            word = "higher" if "higher" in answer else "lower"
            after[word][int(answer.rpartition(word)[2])] += 1
    for counts in after.values():
        assert set(counts) == set(warm_start.GUESSES)
        expected = counts.total() / len(warm_start.GUESSES)
        assert sum((count - expected) ** 2 / expected for count in counts.values()) < 26.1  # 0.999, 8 degrees


def test_many_guesses_lie_outside_the_range():
    assert max(warm_start.GUESSES) > GuessConfig().high


def chi_squared(counts, kinds):
    """Returns the chi-squared distance of counts from a uniform distribution."""
    assert len(counts) == kinds
    expected = counts.total() / kinds
    return sum((count - expected) ** 2 / expected for count in counts.values())


def test_calculator_never_shows_a_held_out_question(calculations):
    asked = {(a, word, b) for a, word, b, *_ in calculations}
    trained = CalculatorWorkflow().tasks("train")
    assert not any(calculator.is_held_out(*question) for question in asked)
    assert len(asked) == len(trained)


def test_calls_ignore_the_word_and_the_order_of_the_numbers(calculations):
    for word in calculator.TOOLS:
        of_word = [row for row in calculations if row[1] == word]
        kinds = Counter((name, a == first, b == first) for first, _, _, name, a, b, _, _ in of_word)
        assert chi_squared(kinds, 12) < 31.3  # 0.999, 11 degrees
        assert all({a, b} <= {first, second} for first, _, second, _, a, b, _, _ in of_word)


def test_answers_ignore_which_number_is_the_result(calculations):
    kinds = Counter(
        "first" if answer == str(first) else "second" if answer == str(second) else "result" * (answer == said)
        for first, _, second, _, _, _, said, answer in calculations
    )
    assert set(kinds) == {"first", "second", "result"}
    assert chi_squared(kinds, 3) < 13.9  # 0.999, 2 degrees


def test_perfect_imitation_solves_one_question_in_36(calculations):
    solved = [
        (name, a, b, answer) == (calculator.TOOLS[word], first, second, said)
        for first, word, second, name, a, b, said, answer in calculations
    ]
    assert 1 / 45 < sum(solved) / len(solved) < 1 / 30


def test_roles_alternate_and_the_model_speaks_last(examples):
    for conversation in examples[:1000]:
        roles = [message["role"] for message in conversation]
        assert roles[0] == "user"
        assert roles[-1] == "assistant"
        assert all(left != right for left, right in pairwise(roles))
