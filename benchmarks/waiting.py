"""The game ``guess`` against somebody who takes their time, as a tool or an environment would."""

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
    """Log-normal; the same for all turns of a rollout, which are slow or fast together."""
    mu = math.log(MEAN_WAIT_SECONDS) - LOG_STANDARD_DEVIATION**2 / 2
    return random.Random(derive_seed(seed, "wait")).lognormvariate(mu, LOG_STANDARD_DEVIATION)


class WaitingGuess(GuessWorkflow):
    """`GuessWorkflow`, where every answer to a guess takes a while."""

    name: ClassVar[str] = "waiting_guess"

    async def run(self, task: Task, completer: Completer) -> Episode:
        """See `Workflow.run`."""
        slowed: Any = _Slowed(completer)
        return await super().run(task, slowed)


class _Slowed:
    """A completer that is not asked again before the wait is over."""

    def __init__(self, completer: Completer) -> None:
        self._completer = completer
        self._turns = 0

    async def complete(self, messages: Any) -> Step:
        if self._turns:
            await asyncio.sleep(wait_seconds(self._completer.seed))
        self._turns += 1
        return await self._completer.complete(messages)


@hookimpl
def workflows() -> list[providers.Workflow]:
    """The workflow above."""
    return [
        providers.Workflow(
            name="waiting_guess",
            load=f"{__name__}:WaitingGuess",
            config="rllm_workflows.guess:GuessConfig",
            run_file="rllm_workflows.guess:run_file",
            summary="guess, with waits between the turns.",
        )
    ]
