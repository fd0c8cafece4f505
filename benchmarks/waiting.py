"""The game ``guess`` with slow replies, like those of a tool or an environment."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any, ClassVar

from rllm_workflows.guess import GuessWorkflow

from rllm_core import hookimpl, providers
from rllm_core.engine import Completer, derive_seed
from rllm_core.types import Episode, Step, Task

MEAN_WAIT_SECONDS = 0.05
LOG_STANDARD_DEVIATION = 0.5


def wait_seconds(seed: int) -> float:
    """Draws a log-normal wait, equal for all turns of a rollout."""
    mu = math.log(MEAN_WAIT_SECONDS) - LOG_STANDARD_DEVIATION**2 / 2
    return random.Random(derive_seed(seed, "wait")).lognormvariate(mu, LOG_STANDARD_DEVIATION)


class WaitingGuess(GuessWorkflow):
    """`GuessWorkflow` with a delay before each reply."""

    name: ClassVar[str] = "waiting_guess"

    async def run(self, task: Task, completer: Completer) -> Episode:
        """See `Workflow.run`."""
        slowed: Any = _Slowed(completer)
        return await super().run(task, slowed)


class _Slowed:
    """Completer that waits before every call except the first."""

    def __init__(self, completer: Completer) -> None:
        self._completer = completer
        self._turns = 0

    async def complete(self, messages: Any) -> Step:
        if self._turns:
            await asyncio.sleep(wait_seconds(self._completer.seed))
        self._turns += 1
        return await self._completer.complete(messages)


@hookimpl
def workflows() -> list[providers.WorkflowProvider]:
    """The workflow above."""
    return [
        providers.WorkflowProvider(
            name="waiting_guess",
            load=f"{__name__}:WaitingGuess",
            config="rllm_workflows.guess:GuessConfig",
            run_file="rllm_workflows.guess:run_file",
            summary="guess, with waits between turns.",
        )
    ]
