"""``placeholder``: reward for a text, compared with the answer of its task."""

from __future__ import annotations

from rllm_core.types import Task


def score(task: Task, text: str) -> float:
    """Returns 1 for the answer, otherwise half the share of characters in the right place.

    This runs in a child process with limits. An exception ends the rollout without a reward; an unreadable answer does
    not raise one, but earns 0.

    Args:
        task: Task of the rollout. ``task.data`` has its ``question`` and ``answer``. Columns that
            ``dataset.reward_columns`` names are in ``task.data["row"]``.
        text: Model output. Parse it, never run it.
    """
    answer, given = str(task.data["answer"]), text.strip()
    if given == answer:
        return 1.0
    return 0.5 * sum(map(str.__eq__, given, answer)) / max(len(given), len(answer))
