"""Conversations a model from scratch is shown before RL, so that it answers in the format at all.

What they teach: to end a turn; on ``sort: dbca``, to answer with *some* permutation of the letters in the prompt; in
``guess``, to repeat the last guess and what was said about it, then to name *some* number.

What they do not teach: the order of the letters, or that ``higher`` and ``lower`` mean anything. A permutation is drawn
uniformly whatever the letters are, a guess uniformly from `GUESSES` whatever was said before, and many guesses lie
outside the range. A model that has learnt them perfectly sorts as well as chance (one in 24 for four different
letters), and its guesses are no better than blind ones. Words of the validation split never occur.

What makes the tasks easier all the same: copying the prompt's letters rather than arbitrary ones leaves RL 24 answers
to choose from instead of 4096, and the echo puts the fact that decides the next guess right in front of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from rllm_workflows import guess, sort

GUESSES = range(10)
"""Numbers the random guesses are drawn from: more than the default range 1 to 5, so that they cannot have used it."""

Conversation = list[dict[str, Any]]

_SORT = sort.SortConfig()
_GUESS = guess.GuessConfig()


def conversations(rng: random.Random) -> Iterator[Conversation]:
    """Endless random conversations, half of them ``sort``, half ``guess``; the assistant's messages are to be learnt.

    Args:
        rng: Decides everything; equal states give equal conversations.
    """
    while True:
        yield sort_conversation(rng) if rng.random() < 0.5 else guess_conversation(rng)


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
