"""Weight sync between separated trainer and rollout without NCCL: verl's checkpoint engine ``cpu_file``.

Rank 0 of the trainer writes one safetensors file, which appears under its final name once complete. Every rollout
worker waits for that name.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

POLL_SECONDS = 0.01


@CheckpointEngineRegistry.register("cpu_file")
class CpuFileCheckpointEngine(CheckpointEngine):
    """``timeout_seconds`` comes from ``checkpoint_engine.engine_kwargs.cpu_file``."""

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_seconds: float = 60.0) -> None:
        self.is_master = is_master
        self.timeout_seconds = timeout_seconds
        self.path: Path | None = None

    def prepare(self) -> dict[str, Any]:
        """Creates a folder for this sync, on rank 0 of the trainer."""
        return {"folder": tempfile.mkdtemp(prefix="verl-weights-")} if self.is_master else {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Passes the folder to all workers; it comes first in ``metadata``, from rank 0 of the trainer."""
        folder = metadata[0]["folder"]
        return {"folder": [folder] * actor_wg_world_size}, {"folder": [folder] * rollout_world_size}

    def init_process_group(self, folder: str) -> None:
        """Stores the path; there is no process group."""
        self.path = Path(folder) / "weights.safetensors"

    def finalize(self) -> None:
        """Removes the folder, on rank 0 of the trainer, once all workers have read it."""
        if self.is_master and self.path is not None:
            shutil.rmtree(self.path.parent)
        self.path = None

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Iterates over the weights on every rank, because gathering a weight from its shards needs all ranks."""
        gathered = {name: weight.detach().clone().contiguous() for name, weight in weights}
        if self.is_master:
            assert self.path is not None
            partial = self.path.with_suffix(".partial")
            save_file(gathered, partial)
            partial.rename(self.path)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields the weights by name, once the file exists.

        Raises:
            TimeoutError: If the file does not appear in time.
        """
        assert self.path is not None
        deadline = time.monotonic() + self.timeout_seconds
        while not self.path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no weights at {self.path} after {self.timeout_seconds:g} s")
            await asyncio.sleep(POLL_SECONDS)
        with safe_open(self.path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (not a mapping)
                yield name, stored.get_tensor(name)
