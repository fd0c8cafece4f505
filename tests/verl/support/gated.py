"""A workflow whose rollouts say that they have begun, and wait until they may go on."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from rllm_core.engine import Completer
from rllm_core.types import Episode, Task
from rllm_core.workflow import Workflow


class Gated(Workflow):
    """Each task names a folder: rollouts write their process ids into it, and wait for its file ``gate``."""

    def tasks(self, split: str) -> list[Task]:
        """No tasks; tests bring theirs."""
        return []

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Asks once, after the wait."""
        folder = Path(task.data["folder"])
        (folder / f"{task.task_id} {os.getpid()}").touch()
        while not (folder / "gate").exists():
            await asyncio.sleep(0.02)
        step = await completer.complete([{"role": "user", "content": "say yes"}])
        return self.episode(task, [step], reward=1.0, metadata={"pid": os.getpid()})
