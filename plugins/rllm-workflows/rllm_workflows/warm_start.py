"""Warm-start conversations that teach a model from scratch the answer formats before RL.

The conversations teach the model to end a turn, and the format of each task:

- ``sort``: answer with *some* permutation of the letters in the prompt.
- ``guess``: repeat the last guess and its feedback, then name *some* number.
- ``calculator``: call *some* tool with numbers of the question, then answer with *some* number seen so far.

They do not teach the order of the letters, the meaning of ``higher`` and ``lower``, the tool for a word, which number
is a and which is b, or that the tool's result is the answer. All choices are uniform: the permutation regardless of the
letters, the guess from `GUESSES` regardless of the feedback (many lie outside the range), and the tool and each of its
numbers regardless of the question. The answer is drawn from the question's numbers and the result.

A model that has learned them perfectly sorts as well as chance (one in 24 for four different letters) and guesses
blindly. It makes the right call and reports its result once in 36 times. Held-out words and questions never occur.

The conversations still make the tasks easier. Copying the prompt's letters leaves RL 24 answers to choose from instead
of 4096. The echo puts the decisive fact right before the next guess. In ``calculator``, every call has the right
format, and a third of the answers are copies of the result.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from rllm_workflows import calculator, guess, sort

GUESSES = range(10)
"""Range of the random guesses; wider than the default range 1 to 5, so that guesses reveal nothing about it."""

Conversation = list[dict[str, Any]]

_SORT = sort.SortConfig()
_GUESS = guess.GuessConfig()
_CALCULATOR = calculator.CalculatorConfig()


def conversations(rng: random.Random) -> Iterator[Conversation]:
    """Yields random conversations of three workflows endlessly; the assistant messages are the targets.

    Args:
        rng: Source of all randomness; equal states yield equal conversations.
    """
    while True:
        [make] = rng.choices(_KINDS, _WEIGHTS)
        yield make(rng)


def sort_conversation(rng: random.Random) -> Conversation:
    """Returns a word of the training split, answered with a random permutation of its letters."""
    while sort.is_held_out(word := "".join(rng.choices(_SORT.letters, k=_SORT.length))):
        pass
    shuffled = "".join(rng.sample(word, k=len(word)))
    return [{"role": "user", "content": sort.prompt(word)}, {"role": "assistant", "content": shuffled}]


def guess_conversation(rng: random.Random) -> Conversation:
    """Returns a game with true feedback, correct echoes and guesses that ignore both; it ends as a rollout would."""
    secret = rng.randint(_GUESS.low, _GUESS.high)
    messages: Conversation = [{"role": "user", "content": guess.prompt(_GUESS.low, _GUESS.high)}]
    echo = ""
    for turn in range(_GUESS.turns):
        number = rng.choice(GUESSES)
        messages.append({"role": "assistant", "content": f"{echo}{number}"})
        if number == secret or turn + 1 == _GUESS.turns:
            break
        said = guess.feedback(number, secret)
        echo = f"{number}{said}"
        messages.append({"role": "user", "content": said})
    return messages


def calculator_conversation(rng: random.Random) -> Conversation:
    """Returns a training question, a random call with its true result, and a random answer from the numbers seen."""
    numbers = range(_CALCULATOR.largest + 1)
    while True:
        word, (a, b) = rng.choice(list(calculator.TOOLS)), rng.sample(numbers, k=2)
        if not calculator.is_held_out(a, word, b):
            break
    name = rng.choice(list(calculator.TOOLS.values()))
    arguments = {"a": rng.choice((a, b)), "b": rng.choice((a, b))}
    result = calculator.Calculator(rng.getrandbits(32)).call(name, arguments)
    call = {"id": "call_0_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": calculator.prompt(a, word, b)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": result},
        {"role": "assistant", "content": rng.choice((str(a), str(b), result))},
    ]


_KINDS = (sort_conversation, guess_conversation, calculator_conversation)
_WEIGHTS = (2, 1, 2)  # guesses copy only their echo, so the model learns them much sooner than the others
