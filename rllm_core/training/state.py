"""What hooks see of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rllm_core.config import RunConfig


@dataclass(frozen=True)
class TrainerState:
    """A snapshot of a run, read-only.

    Attributes:
        config: The resolved run file.
        run_dir: Folder of the run.
        incarnation: Number of this start of the run, from 0.
        step: Optimizer steps done.
        weight_version: Version the engine samples from.
        epoch: Pass over the training tasks that is being dispatched, from 0.
    """

    config: RunConfig
    run_dir: Path
    incarnation: int
    step: int
    weight_version: int
    epoch: int
