"""Runs rollouts in a host, with a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllm_core.builtin.process_host import Processes
from rllm_core.config import RunConfig
from rllm_core.hosts.contract import HostedWorkflow, HostReport, RolloutHost
from rllm_core.hosts.inline import Inline
from rllm_core.providers import resolve
from rllm_core.runs.launch import opened
from rllm_core.training.rollouts import Rollout, RolloutKey, RolloutRunner
from rllm_core.types import Episode, Task
from rllm_devkit.scripted import ByteParser, Script, ScriptedEngine

WORKFLOWS = Path(__file__).parent.parent / "hosts" / "workflows.py"


class ToolParser(ByteParser):
    """Parser that accepts tools."""

    supports_tools = True


@dataclass
class Played:
    """What became of some rollouts."""

    rollouts: list[Rollout]
    report: HostReport
    notes: list[str] = field(default_factory=list)

    @property
    def episodes(self) -> list[Episode]:
        """Their episodes."""
        return [rollout.episode for rollout in self.rollouts]


def play(
    workflow: str,
    tasks: Sequence[Task | str],
    *,
    host: type[RolloutHost] = Processes,
    script: Script | None = None,
    folder: Path | None = None,
    during: Callable[[RolloutHost], Any] | None = None,
    purpose: str = "train",
    **rollout: Any,
) -> Played:
    """Runs a rollout of every task at once; ``during`` is awaited beside them."""
    config = RunConfig.model_validate({"workflow": workflow, "rollout": rollout})
    load = f"{WORKFLOWS}:{workflow}"
    hosted = HostedWorkflow(workflow=resolve(load)(), load=load, section={})
    notes: list[str] = []

    async def run() -> Played:
        at = host(hosted, config.rollout)
        engine = ScriptedEngine(script=script)
        engine.parser = ToolParser()
        runner = RolloutRunner(at, engine, config, lockstep=False)
        async with opened(at, config, notes.append, settled=runner.merger.settled, folder=folder):
            beside = asyncio.create_task(during(at)) if during is not None else None
            played = [
                runner.run(task if isinstance(task, Task) else Task(task_id=task), RolloutKey(purpose, number, 0))
                for number, task in enumerate(tasks)
            ]
            rollouts = list(await asyncio.gather(*played))
            if beside is not None:
                await beside
            return Played(rollouts, at.report())

    played = asyncio.run(run())
    played.notes = notes
    return played


__all__ = ["Inline", "Played", "play"]
