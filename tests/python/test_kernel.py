"""Tests a real notebook kernel: its own event loop runs, and interrupting it saves a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rllm_core
from rllm_core.run_folder import checkpoint

CELL = """
import asyncio
from pathlib import Path

import rllm_core
from rllm_core.types import Task
from rllm_core.workflow import Workflow


class Letters(Workflow):
    def tasks(self, split):
        return [Task(task_id=f"{split}-{word}", data={"word": word}) for word in ("abc", "bca", "cab")]

    async def run(self, task, completer):
        while Path("hold").exists() and Path("run/checkpoints/step-000003").exists():
            await asyncio.sleep(0.01)
        step = await completer.complete([{"role": "user", "content": task.data["word"]}])
        return self.episode(task, [step], reward=float(len(step.text) > 2))


settings = {"training": {"steps": 60, "groups_per_step": 2, "rollouts_per_group": 2, "checkpoint_every_steps": 3}}
"""


@pytest.fixture
def kernel(folder: Path) -> Iterator[Any]:
    """Manager and client of a kernel that works in the folder."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", cwd=str(folder))
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def reply_to(client: Any, number: str) -> dict[str, Any]:
    while True:
        message: dict[str, Any] = client.get_shell_msg(timeout=600)
        if message["parent_header"].get("msg_id") == number:
            return dict(message["content"])


@pytest.mark.slow
def test_interrupting_a_cell_saves_and_the_next_one_continues(kernel: Any, folder: Path) -> None:
    manager, client = kernel
    assert reply_to(client, client.execute(CELL))["status"] == "ok"
    # After an error a kernel aborts for a moment what is sent to it, which would be the cell that continues.
    # However busy the machine is, the run does not end before it is interrupted.
    (folder / "hold").touch()
    cell = "run = rllm_core.train(Letters, settings, backend='local', run_dir='run')"
    number = client.execute(cell, stop_on_error=False)
    while not checkpoint.complete(folder / "run" / "checkpoints"):
        time.sleep(0.01)
    manager.interrupt_kernel()
    answer = reply_to(client, number)
    assert answer.get("ename") == "KeyboardInterrupt", answer
    run = rllm_core.Run(folder / "run")
    (folder / "hold").unlink()
    assert run.status == "interrupted"
    assert 0 < run.summary["optimizer_steps"] < 60
    copy = (run.path / "files" / "Letters.py").read_text(encoding="utf-8")
    assert copy.startswith("class Letters(Workflow)")
    assert "settings" not in copy
    answer = reply_to(client, client.execute("run = rllm_core.train(Letters, run_dir='run', resume=True)"))
    assert answer["status"] == "ok", answer
    assert run.status == "completed"
