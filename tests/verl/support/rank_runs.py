"""Runs `training_rank.py` on one or more ranks, each a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from verl_runs import RUN_SECONDS

RANK = Path(__file__).with_name("training_rank.py")
RANKS = 2  # of the shared run


@dataclass(frozen=True)
class Report:
    """Output of the ranks of one group, in row order."""

    folder: Path
    ranks: tuple[dict[str, Any], ...]

    def rows(self, name: str) -> torch.Tensor:
        """``(batch, response_tokens)``."""
        return torch.tensor([row for rank in self.ranks for row in rank[name]])

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{name}.safetensors")


def train(model: Path, folder: Path, ranks: int, program: Path = RANK) -> Report:
    """Runs all ranks to completion; if one fails, stops the others."""
    command = [sys.executable, str(program), str(model), str(folder)]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DIST_INIT_METHOD": f"file://{folder}/rendezvous"}
    processes = []
    for rank in range(ranks):
        environment = os.environ | place | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
        with (folder / f"rank{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(RUN_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = "\n".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(ranks))
    assert codes == [0] * ranks, logs
    return Report(folder, tuple(json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)))
