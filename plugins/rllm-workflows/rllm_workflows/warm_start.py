"""Conversations a model from scratch is shown before RL, so that it answers in the format at all.

What they teach: to end a turn; on ``sort: dbca``, to answer with *some* permutation of the letters in the prompt; in
``guess``, to repeat the last guess and what was said about it, then to name *some* number; in ``calculator``, to call
*some* tool with numbers of the question, then to answer with *some* number that it has seen.

What they do not teach: the order of the letters, that ``higher`` and ``lower`` mean anything, which tool a word asks
for, which number is a and which is b, or that the tool's result is the answer. A permutation is drawn uniformly
whatever the letters are, a guess uniformly from `GUESSES` whatever was said before (many lie outside the range), the
tool and each of its numbers uniformly and independently of the question, and so is the answer from the question's
numbers and the result. A model that has learnt them perfectly sorts as well as chance (one in 24 for four different
letters), its guesses are no better than blind ones, and it makes the right call and reports its result once in 36
times. Held-out words and questions never occur.

What makes the tasks easier all the same: copying the prompt's letters rather than arbitrary ones leaves RL 24 answers
to choose from instead of 4096, the echo puts the fact that decides the next guess right in front of it, and in
``calculator`` every call has the format already and a third of the answers are copies of the result.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from rllm_workflows import calculator, guess, sort

GUESSES = range(10)
"""Numbers the random guesses are drawn from: more than the default range 1 to 5, so that they cannot have used it."""

Conversation = list[dict[str, Any]]

_SORT = sort.SortConfig()
_GUESS = guess.GuessConfig()
_CALCULATOR = calculator.CalculatorConfig()


def conversations(rng: random.Random) -> Iterator[Conversation]:
    """Endless random conversations of three workflows; the assistant's messages are to be learnt.

    Args:
        rng: Decides everything; equal states give equal conversations.
    """
    while True:
        [make] = rng.choices(_KINDS, _WEIGHTS)
        yield make(rng)


def sort_conversation(rng: random.Random) -> Conversation:
    """A word of the training split, answered with a random permutation of its letters."""
    while sort.is_held_out(word := "".join(rng.choices(_SORT.letters, k=_SORT.length))):
        pass
    shuffled = "".join(rng.sample(word, k=len(word)))
    return [{"role": "user", "content": sort.prompt(word)}, {"role": "assistant", "content": shuffled}]


def guess_conversation(rng: random.Random) -> Conversation:
    """A game with true feedback, correct echoes, and guesses that ignore both; it ends as a rollout would."""
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
    """A training question, a random call with its true result, and a random one of the numbers seen as the answer."""
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
_WEIGHTS = (2, 1, 2)  # a guess copies nothing but its echo, and is learnt long before the others
