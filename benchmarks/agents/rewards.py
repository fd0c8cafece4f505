"""Rewards of the agents by the rules of the native workflows, from what an agent returns."""

from __future__ import annotations

import json
from typing import Any

from rllm_workflows.calculator import EXECUTED, INVALID, RIGHT_PARTS, right_share, score_answer

from rllm_core.types import Task

MAX_CALLS = 3
REWARDS_OF_GAME = {"found": 1.0, "missed": 0.0, "invalid": -1.0}


def of_guess(task: Task, result: str) -> float:
    """Returns the reward of a game's outcome."""
    return REWARDS_OF_GAME[result]


def of_calculator(task: Task, result: str) -> float:
    """Returns the sum of the rewards that workflow ``calculator`` gives to turns: 2 if the task is solved."""
    *turns, end = json.loads(result)
    display, is_right, earned = "", False, 0.0
    for number, (said, shown) in enumerate(zip(turns[::2], [*turns[1::2], None], strict=False)):
        if number == MAX_CALLS and shown is not None:
            break
        if shown is None:
            return earned + _last(said, end["finish_reason"], display, is_right=is_right, is_first=len(turns) == 1)
        if shown["content"].isdigit():
            called: dict[str, Any] = said["tool_calls"][0]["function"]
            share = right_share(task.data, called["name"], json.loads(called["arguments"]))
            display, is_right = shown["content"], share == 1.0
            earned = max(earned, EXECUTED + RIGHT_PARTS * share)
    return earned


def _last(said: dict[str, Any], finish_reason: str, display: str, *, is_right: bool, is_first: bool) -> float:
    if finish_reason == "length" or said.get("tool_calls") or is_first:
        return INVALID
    return score_answer(said["content"].strip(), display, is_right)


def of_framework(task: Task, result: str) -> float:
    """Returns the reward of an answer alone: 1 if it repeats the last display."""
    ended = json.loads(result)
    if "answer" not in ended or not ended["shown"]:
        return INVALID
    return score_answer(str(ended["answer"]).strip(), ended["shown"][-1], is_right=True)
