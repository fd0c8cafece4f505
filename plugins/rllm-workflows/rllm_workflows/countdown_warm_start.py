"""Conversations that teach a model the format of ``countdown`` from scratch, for tasks with two small numbers.

    python -m rllm_local.starter --task countdown --out countdown-model

They teach the format only: an answer joins the numbers of the question in a random order with a random sign, whatever
the target is. A model that has learned them perfectly reaches the target by chance: with one answer in four for sums
and products, where order does not matter, and one in eight for differences and quotients. Held-out tasks never occur.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from rllm_workflows.countdown import CountdownConfig, CountdownWorkflow

TARGET_LOSS = 0.3
"""Loss in nats per answer token at convergence: ln 4 for a sign, ln 2 for the order, and nothing for the rest."""

SETTINGS: dict[str, int] = {
    "numbers": 2,
    "largest": 50,
    "largest_target": 50,
    "train_tasks": 1500,
    "validation_tasks": 200,
}
"""Settings ``[countdown]`` for a model of this size."""


def conversations(rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Yields endless random conversations; the assistant messages are the targets.

    Args:
        rng: Source of all random choices; equal states give equal conversations.
    """
    tasks = CountdownWorkflow(CountdownConfig.model_validate(SETTINGS)).tasks("train")
    while True:
        task = rng.choice(tasks)
        left, right = rng.sample(task.data["nums"], k=2)
        yield [
            {"role": "user", "content": task.data["question"]},
            {"role": "assistant", "content": f"<answer>{left} {rng.choice('+-*/')} {right}</answer>"},
        ]
