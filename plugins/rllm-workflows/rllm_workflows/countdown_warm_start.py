"""Conversations that teach a model from scratch the form of ``countdown``, for tasks with two small numbers.

    python -m rllm_local.starter --task countdown --out countdown-model

They teach form only: an answer joins the numbers of the question, in a random order, by a random sign, whatever the
target is. A model that has learnt them perfectly reaches the target as often as chance: one answer in four for sums
and products, whose order does not matter, and one in eight for differences and quotients. Held-out tasks never occur.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from rllm_workflows.countdown import CountdownConfig, CountdownWorkflow

TARGET_LOSS = 0.3
"""Nats per token of an answer: a sign has ln 4, the order of the numbers ln 2, and the rest is certain."""

SETTINGS: dict[str, int] = {
    "numbers": 2,
    "largest": 50,
    "largest_target": 50,
    "train_tasks": 1500,
    "validation_tasks": 200,
}
"""``[countdown]`` for such a model."""


def conversations(rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Endless random conversations; the assistant's messages are to be learnt.

    Args:
        rng: Decides everything; equal states give equal conversations.
    """
    tasks = CountdownWorkflow(CountdownConfig.model_validate(SETTINGS)).tasks("train")
    while True:
        task = rng.choice(tasks)
        left, right = rng.sample(task.data["nums"], k=2)
        yield [
            {"role": "user", "content": task.data["question"]},
            {"role": "assistant", "content": f"<answer>{left} {rng.choice('+-*/')} {right}</answer>"},
        ]
