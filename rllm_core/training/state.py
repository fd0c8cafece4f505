"""State of a run for hooks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rllm_core.config import RunConfig


@dataclass(frozen=True)
class TrainerState:
    """A read-only snapshot of a run.

    Attributes:
        config: Resolved run file.
        run_dir: Run folder.
        incarnation: Number of this launch, from 0.
        step: Optimizer steps done.
        weight_version: Version of the weights that the engine samples from.
        epoch: Current pass over the training tasks, from 0.
    """

    config: RunConfig
    run_dir: Path
    incarnation: int
    step: int
    weight_version: int
    epoch: int
