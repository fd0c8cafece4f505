"""Workflows for the checks of rollout hosts: the reference workflow, with instructions that harm its process."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

from rllm_core.engine import Completer, EngineError
from rllm_core.types import Episode, Task
from rllm_devkit.reference import Playing, Reference


class HostedPlaying(Playing):
    """A rollout of `Hosted`."""

    async def _do_time_out(self) -> None:
        raise TimeoutError("a tool took too long")

    async def _do_engine_error(self) -> None:
        raise EngineError("an engine of its own")

    async def _do_mark_end(self, began: str, ended: str) -> None:
        """Waits until the rollout is cancelled, and then leaves a file."""
        try:
            Path(began).touch()
            await asyncio.Event().wait()
        finally:
            Path(ended).touch()

    async def _do_child(self, pids: str) -> None:
        """Starts a process, and records its id."""
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], stdin=subprocess.DEVNULL)
        with Path(pids).open("a", encoding="utf-8") as file:
            file.write(f"{child.pid}\n")

    async def _do_exit(self) -> None:
        os._exit(3)

    async def _do_block(self) -> None:
        time.sleep(3600)


class Hosted(Reference):
    """Follows instructions, and reports where the workflow was opened."""

    name: ClassVar[str] = "hosted"
    playing: ClassVar[type[Playing]] = HostedPlaying

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._opened: list[int] = []

    async def open(self) -> None:
        """Records the process."""
        self._opened.append(os.getpid())

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Adds the rollout's host and process to its episode, and the processes in which the workflow was opened."""
        episode = await super().run(task, completer)
        where = {"host": socket.gethostname(), "pid": os.getpid(), "opened": self._opened}
        episode.metadata = {**episode.metadata, "where": where}
        return episode


class Unopenable(Hosted):
    """A workflow that cannot be opened."""

    name: ClassVar[str] = "unopenable"

    async def open(self) -> None:
        """Raises an error."""
        raise OSError("the check has no server")
