"""The checkers, importing reasoning-gym at module load, for sandboxes that start a new process for every call."""

from __future__ import annotations

import warnings
from typing import Any

from rllm_core.types import Task
from rllm_environments.reasoning_gym import child

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import reasoning_gym  # noqa: F401


def score(recipe: dict[str, Any], text: str) -> tuple[float, dict[str, float]]:
    """See `rllm_environments.reasoning_gym.child.score`."""
    return child.score(Task(task_id="in a sandbox", data=recipe), text)
