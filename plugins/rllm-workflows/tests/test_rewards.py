from __future__ import annotations

import asyncio

import pytest
import rllm_workflows
from rllm_workflows import rewards

from rllm_core.services import Services
from rllm_core.types import Task


def task_of(answer):
    return Task(task_id="t", data={"answer": answer})


@pytest.mark.parametrize(
    ("name", "answer", "text", "reward"),
    [
        ("exact_match", "abcd", " abcd\n", 1.0),
        ("exact_match", "abcd", "ABCD", 0.0),
        ("exact_match", "abcd", "abcd.", 0.0),
        ("exact_match", 7, "7", 1.0),
        ("exact_match", ["seven", "7"], "7", 1.0),
        ("exact_match", ["seven", "7"], "8", 0.0),
        ("contains", "Paris", "It is paris, of course.", 1.0),
        ("contains", "Paris", "a comparison", 0.0),
        ("contains", "New York", "in new   york!", 1.0),
        ("contains", "New York", "a new city, York", 0.0),
        ("contains", "12", "112 and 12.5 and -12", 0.0),
        ("contains", "12", "is it 12?", 1.0),
        ("contains", "ﬁne", "FINE", 1.0),
        ("numeric", "42", "First 7, then 42.", 1.0),
        ("numeric", 42, "42.0", 1.0),
        ("numeric", 0.5, "1/2", 1.0),
        ("numeric", "so 40 + 2 = 42 #### 42", "The answer is 42", 1.0),
        ("numeric", "42", "42 or 43", 0.0),
        ("numeric", "1234.5", "$1,234.50", 1.0),
        ("numeric", "-3", "it falls by -3", 1.0),
        ("numeric", "3", "it falls by -3", 0.0),
        ("numeric", "42", "no number", 0.0),
        ("numeric", "1", "1/0", 0.0),
        ("numeric", "42", "４２", 0.0),  # noqa: RUF001
        ("numeric", "-5", "it is \N{MINUS SIGN}5", 1.0),
        ("numeric", "-5", "it is -$5", 1.0),
        ("numeric", "0.5", "it is .5", 1.0),
        ("numeric", "5", "it is...5", 1.0),
        ("numeric", "-3", "1e-3", 0.0),
        ("numeric", "0.001", "1e-3", 1.0),
        ("numeric", "0.5", r"\boxed{\frac{1}{2}}", 1.0),
        ("numeric", "0.5", "1 / 2", 1.0),
        ("numeric", "0.5", "It is 1/2.", 1.0),
        ("numeric", "42", "It is __42__", 1.0),
        ("numeric", "50", "It is 50 cm^2, or 50 cm^{2}, of H_2O.", 1.0),
        ("numeric", "1234", "1{,}234", 1.0),
        ("math", r"so it is \boxed{\frac{1}{2}}", "0.5, or 7? The answer is \\boxed{.5}", 1.0),
        ("math", 0.5, "It is 1/2.", 1.0),
        ("math", ["yes", "sure"], r"\boxed{\text{Yes}}", 1.0),
        ("math", "(3, 4)", r"\boxed{(4, 3)}", 0.0),
        ("math", "7", "", 0.0),
        ("multiple_choice", "B", "B", 1.0),
        ("multiple_choice", "B", "(b).", 1.0),
        ("multiple_choice", "B", "(b)", 1.0),
        ("multiple_choice", "B", "Not A. The answer is B.", 1.0),
        ("multiple_choice", "B", "Answer: C ... no, answer: (B)", 1.0),
        ("multiple_choice", "B", "I think (A) is wrong, so (B)", 1.0),
        ("multiple_choice", "A", "A cat sat on the mat", 0.0),
        ("multiple_choice", "(C)", "the answer is c", 1.0),
        ("multiple_choice", "B", "The answer is **B**.", 1.0),
        ("multiple_choice", "B", "**Answer:** B", 1.0),
        ("multiple_choice", "B", r"(A) is wrong: $\boxed{\text{B}}$", 1.0),
        ("multiple_choice", "B", "<answer>B</answer>", 1.0),
        ("multiple_choice", "B", "The correct option is: B", 1.0),
        ("multiple_choice", "B", "the answer is option B", 1.0),
        ("multiple_choice", "B", "B. Paris", 1.0),
        ("multiple_choice", "B. Paris", "B) Paris", 1.0),
        ("multiple_choice", "B", "A. London is wrong.\nB. Paris is right.", 0.0),
        ("multiple_choice", "A", "The answer is a city.", 0.0),
        ("multiple_choice", "I", "The answer is I think (C)", 0.0),
        ("multiple_choice", "C", "The answer is I think (C)", 1.0),
        ("f1", "the Eiffel Tower", "Eiffel tower!", 1.0),
        ("f1", "red green blue", "green", 0.5),
        ("f1", ["red", "dark red"], "dark red", 1.0),
        ("f1", "red", "green", 0.0),
        ("f1", "red", "", 0.0),
    ],
)
def test_rewards(name, answer, text, reward):
    assert getattr(rewards, name)(task_of(answer), text) == reward


@pytest.mark.parametrize("name", [record.name for record in rllm_workflows.reward_functions()])
@pytest.mark.parametrize(
    "text",
    [
        "1" * 300_000,
        "1," * 150_000,
        "(" * 300_000,
        "answer is " * 30_000,
        " " * 300_000,
        "1/" * 100_000,
        "\ud800 1",
        "é" * 9**6,
    ],
)
def test_long_and_broken_texts_have_rewards(name, text):
    assert 0.0 <= getattr(rewards, name)(task_of("B" if name == "multiple_choice" else "7"), text) <= 1.0


@pytest.mark.parametrize("record", rllm_workflows.reward_functions(), ids=lambda record: record.name)
def test_they_are_found_by_name_and_run_in_a_child(record):
    async def graded():
        services = Services()
        try:
            reward = services.reward_function(record.name)
            answer = "B" if record.name == "multiple_choice" else "7"
            return await reward(task_of(answer), answer), await reward(task_of(answer), "")
        finally:
            await services.close()

    assert asyncio.run(graded()) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "answer", "problem"),
    [
        ("numeric", "none", "'none' does not contain a number"),
        ("numeric", ["1", "one"], "'one' does not contain a number"),
        ("math", "####", "does not contain an answer"),
        ("multiple_choice", "Paris", "does not contain a letter"),
        ("multiple_choice", 2, "does not contain a letter"),
        ("contains", "?!", "does not contain a word"),
        ("f1", "the", "does not contain a word"),
    ],
)
def test_answers_that_could_never_be_matched(name, answer, problem):
    assert problem in rewards.unusable(name, answer)


def test_answers_that_can_be():
    assert rewards.unusable("numeric", 3.5) is None
    assert rewards.unusable("exact_match", "?!") is None
    assert rewards.unusable("of_somebody_else", "?!") is None
