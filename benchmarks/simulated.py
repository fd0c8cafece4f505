"""Scripted backends with delays, and a workflow whose rollouts share no prompts."""

from __future__ import annotations

import asyncio
import math
import random
from typing import ClassVar

from rllm_core import hookimpl
from rllm_core.backend import PolicyUpdate
from rllm_core.config import RunConfig, Section
from rllm_core.engine import Completer
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager
from rllm_core.providers import BackendProvider, WorkflowProvider
from rllm_core.types import Episode, Messages, Step, Task
from rllm_devkit.scripted import Script, ScriptedBackend, ScriptedEngine, ScriptedWorkflow

MEAN_ROLLOUT_SECONDS = 60.0
MAX_ROLLOUT_SECONDS = 480.0
TRAIN_SECONDS = 120.0
SYNC_SECONDS = 4.0


def rollout_seconds(generator: random.Random, log_standard_deviation: float) -> float:
    """Draws a log-normal duration with mean ``MEAN_ROLLOUT_SECONDS``, then caps it."""
    mu = math.log(MEAN_ROLLOUT_SECONDS) - log_standard_deviation**2 / 2
    return min(generator.lognormvariate(mu, log_standard_deviation), MAX_ROLLOUT_SECONDS)


class SimulatedConfig(Section):
    """``[simulated]``.

    Attributes:
        log_standard_deviation: Log standard deviation of the rollout times; 0 makes all equally long.
    """

    log_standard_deviation: float = 1.0


class SimulatedBackend(ScriptedBackend):
    """Takes the workload's times, and samples while it trains."""

    name: ClassVar[str] = "simulated"
    seconds_per_step: ClassVar[float] = TRAIN_SECONDS

    def __init__(self, config: RunConfig, plugins: PluginManager) -> None:
        super().__init__(config, plugins)
        self.rollout_seconds: list[float] = []

    async def init_rollout_engine(self, parser: BaseParser) -> ScriptedEngine:
        """See `BackendProtocol.init_rollout_engine`."""
        self.rollout_engine = ScriptedEngine(parser, Script(latency_seconds=self._latency), skill=self.skill)
        return self.rollout_engine

    def _latency(self, generator: random.Random) -> float:
        settings: SimulatedConfig = self.config.plugins[self.name]
        self.rollout_seconds.append(rollout_seconds(generator, settings.log_standard_deviation))
        return self.rollout_seconds[-1]

    async def on_policy_updated(self, update: PolicyUpdate) -> None:
        """See `BackendProtocol.on_policy_updated`; sending the initial weights takes no time."""
        if update.reason == "step":
            await asyncio.sleep(SYNC_SECONDS)
        await super().on_policy_updated(update)


class PunctualConfig(Section):
    """``[punctual]``."""

    turn_seconds: float = 0.0


class PunctualBackend(ScriptedBackend):
    """Takes equally long for every turn, and no time for training."""

    name: ClassVar[str] = "punctual"

    async def init_rollout_engine(self, parser: BaseParser) -> ScriptedEngine:
        """See `BackendProtocol.init_rollout_engine`."""
        seconds: float = self.config.plugins["punctual"].turn_seconds
        script = Script(latency_seconds=lambda generator: seconds) if seconds else Script()
        self.rollout_engine = ScriptedEngine(parser, script, skill=self.skill)
        return self.rollout_engine


class OwnPrompts(ScriptedWorkflow):
    """Starts each rollout with its own prompt, because equal prompts would share one call and end together.

    Before that, the environment takes up to ``wait_seconds`` to start.
    """

    name: ClassVar[str] = "own_prompts"

    async def run(self, task: Task, completer: Completer) -> Episode:
        """See `rllm_core.workflow.Workflow.run`."""
        steps = await self.converse(task, completer)
        return self.episode(task, steps, reward=sum(step.text == "yes" for step in steps) / len(steps))

    async def converse(self, task: Task, completer: Completer) -> list[Step]:
        """Runs ``turns`` turns and returns their steps."""
        if self.config.wait_seconds:
            await asyncio.sleep(random.Random(completer.seed).uniform(0.0, self.config.wait_seconds))
        messages = Messages([{"role": "user", "content": f"{task.task_id} {completer.seed}"}])
        steps: list[Step] = []
        while True:
            step = await completer.complete(messages)
            steps.append(step)
            if len(steps) == self.config.turns:
                return steps
            messages += [step.response, {"role": "user", "content": "again"}]


class SimulationPlugin:
    """Provides the backends and the workflow above."""

    @hookimpl
    def backends(self) -> list[BackendProvider]:
        """See `rllm_core.hookspecs.backends`."""
        load = f"{__name__}:SimulatedBackend"
        return [
            BackendProvider(
                name="simulated",
                load=load,
                summary="Simulated times with a long tail.",
                default_parser="bytes",
                config=f"{__name__}:SimulatedConfig",
            ),
            BackendProvider(
                name="punctual",
                load=f"{__name__}:PunctualBackend",
                summary="Equal times for all turns.",
                default_parser="bytes",
                config=f"{__name__}:PunctualConfig",
            ),
        ]

    @hookimpl
    def workflows(self) -> list[WorkflowProvider]:
        """See `rllm_core.hookspecs.workflows`."""
        load = f"{__name__}:OwnPrompts"
        config = "rllm_devkit.scripted:ScriptedWorkflowConfig"
        return [WorkflowProvider(name="own_prompts", load=load, summary="One turn each.", config=config)]
