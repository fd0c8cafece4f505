"""The guessing game, whose rollouts wait once the run has taken as many steps as a test allows."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from rllm_workflows.guess import GuessConfig, GuessWorkflow

from rllm_core.engine import Completer
from rllm_core.types import Episode, Task
from rllm_core.workflow import WorkflowConfig


class HeldConfig(GuessConfig):
    """``[held]``: where the test and the rollouts meet."""

    folder: Annotated[str, Field(description="Folder with the file `allowed` and the marks of those that wait.")]
    metrics: Annotated[str, Field(description="The file of the run with one line per step.")]


class HeldWorkflow(GuessWorkflow):
    """Each rollout waits while the file ``allowed`` says so, and leaves a mark."""

    name: ClassVar[str] = "held"
    config_model: ClassVar[type[WorkflowConfig]] = HeldConfig
    config: HeldConfig

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Plays the game after the wait."""
        folder, metrics = Path(self.config.folder), Path(self.config.metrics)
        while metrics.is_file() and len(metrics.read_bytes().splitlines()) >= (
            allowed := int((folder / "allowed").read_text())
        ):
            (folder / f"held-{allowed}-{os.getpid()}").touch()
            await asyncio.sleep(0.02)
        return await super().run(task, completer)
