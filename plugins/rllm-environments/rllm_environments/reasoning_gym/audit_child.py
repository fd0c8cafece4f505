"""The parts of the audit that import reasoning-gym; they run in child processes."""

from __future__ import annotations

import ast
import json
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rllm_core.types import Task
from rllm_environments.reasoning_gym import child

CHECK_SECONDS = 10.0
EXECUTING = ("compile", "eval", "exec", "parse_expr", "sympify")
"""Functions that execute their argument; ``parse_expr`` and ``sympify`` of sympy call ``eval``."""


def names() -> list[str]:
    """Returns the names of all datasets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import reasoning_gym  # noqa: F401 - registers the datasets
        from reasoning_gym.factory import DATASETS
    return sorted(DATASETS)


def items(name: str, seed: int, count: int, order: Literal["forward", "backward"]) -> dict[str, Any]:
    """Creates the first items of a dataset, in ascending or descending order.

    Returns:
        ``items`` with questions and answers, ordered by index; CPU ``seconds``; and ``survives_json``, whether they
            survive a JSON round trip.
        ``survives_json``.
    """
    dataset = child.dataset(name, "{}", seed, child.key_of(recipe(name, 0))[3])
    started = time.process_time()
    made = {index: dataset[index] for index in (range(count) if order == "forward" else reversed(range(count)))}
    seconds = time.process_time() - started
    shown = [{"question": str(made[index]["question"]), "answer": made[index]["answer"]} for index in range(count)]
    return {
        "items": [{**item, "answer": None if item["answer"] is None else str(item["answer"])} for item in shown],
        "seconds": seconds,
        "survives_json": all(_survives_json(item) for item in made.values()),
    }


def recipe(name: str, index: int) -> dict[str, Any]:
    """Returns the recipe of an audited item."""
    return {"environment": name, "options": {}, "seed": 1, "train_size": 10, "validation_size": 1, "index": index} | {
        "check_seconds": CHECK_SECONDS
    }


def score(name: str, index: int, text: str) -> tuple[float, dict[str, float]]:
    """Scores a text for an audited item in the same way as a run does."""
    return child.score(Task(task_id="audit", data=recipe(name, index)), text)


def executes(name: str) -> bool:
    """Whether a dataset's module passes a variable called ``answer`` to a function that executes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import reasoning_gym  # noqa: F401
        from reasoning_gym.factory import DATASETS
    file = sys.modules[DATASETS[name][0].__module__].__file__
    assert file is not None
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    return any(_called(call) in EXECUTING and "answer" in _variables(call.args[0]) for call in calls)


def _called(call: ast.Call) -> str:
    function: Any = call.func
    return str(getattr(function, "id", getattr(function, "attr", "")))


def _variables(node: ast.expr) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _survives_json(item: Mapping[str, Any]) -> bool:
    try:
        return bool(json.loads(json.dumps(item)) == item)
    except (TypeError, ValueError):
        return False
