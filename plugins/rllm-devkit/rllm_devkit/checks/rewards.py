"""Contract checks for reward functions; see `check_reward_function`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rllm_core.sandbox import ChildError, Limits
from rllm_core.services import RewardFunction, Services
from rllm_core.types import Task
from rllm_devkit.checks.answers import HOSTILE
from rllm_devkit.checks.results import Check, CheckResult, NotApplicable, Violation, checked

if TYPE_CHECKING:
    from rllm_core.plugins import PluginManager

LIMITS = Limits(wall_seconds=10.0)
ORDINARY = ("", "yes", "I do not know.", "The answer is 42.")


async def check_reward_function(reward: RewardFunction, tasks: Sequence[Task]) -> list[CheckResult]:
    """Checks a reward function against its contract, as workflows call it: in a child process.

    In a test: ``assert not [r for r in await check_reward_function(mine, tasks) if r.outcome == "failed"]``.

    Args:
        reward: Result of `rllm_core.services.Services.reward_function`.
        tasks: Tasks with the data that the function reads. Without any, nothing can be checked.

    Returns:
        One result per check.
    """
    return await checked(_RewardProbe(reward, tasks), REWARD_CHECKS)


async def check_selected(plugins: PluginManager, name: str, tasks: Sequence[Mapping[str, Any]]) -> list[CheckResult]:
    """Checks the reward function that a name selects, on tasks with this data."""
    services = Services(plugins)
    try:
        reward = services.reward_function(name, LIMITS)
        return await check_reward_function(
            reward, [Task(task_id=str(number), data=dict(data)) for number, data in enumerate(tasks)]
        )
    finally:
        await services.close()


@dataclass
class _RewardProbe:
    """Reward function under test."""

    function: RewardFunction
    tasks: Sequence[Task]

    def given(self) -> Sequence[Task]:
        if not self.tasks:
            raise NotApplicable("there are no tasks to reward; set `tasks` in a test with RewardFunctionContract")
        return self.tasks

    async def reward(self, task: Task, text: str) -> float:
        try:
            return await self.function(task, text)
        except (ChildError, ValueError) as error:
            shown = " ".join(str(error).split())
            raise Violation(f"no reward for task {task.task_id!r} and text {text[:40]!r}: {shown}") from error


async def _numbers(probe: _RewardProbe) -> str:
    rewards = [await probe.reward(task, text) for task in probe.given() for text in ORDINARY]
    return f"{len(rewards)} rewards from {min(rewards):g} to {max(rewards):g}"


async def _hostile(probe: _RewardProbe) -> str:
    task = probe.given()[0]
    for text in HOSTILE:
        await probe.reward(task, text)
    return f"{len(HOSTILE)} texts"


async def _repeatable(probe: _RewardProbe) -> str:
    pairs = [(task, text) for task in probe.given() for text in ORDINARY]
    first = [await probe.reward(task, text) for task, text in pairs]
    again = [await probe.reward(task, text) for task, text in reversed(pairs)][::-1]
    for (task, text), before, after in zip(pairs, first, again, strict=True):
        if before != after:
            raise Violation(f"task {task.task_id!r} and text {text!r} earned {before:g}, and later {after:g}")
    return f"{len(pairs)} rewards, twice"


REWARD_CHECKS: dict[str, Check[_RewardProbe]] = {
    "numbers": _numbers,
    "hostile texts": _hostile,
    "repeatable": _repeatable,
}
