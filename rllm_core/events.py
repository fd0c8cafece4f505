"""Arguments of event hooks besides episodes: the state of the run and its weight syncs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rllm_core.config import RunConfig


@dataclass(frozen=True)
class PolicyUpdate:
    """A weight sync: new weights for the engine.

    Attributes:
        version: Weight version: 0 for the initial weights of a new run; each weight sync adds one.
        optimizer_step: Number of optimizer steps behind these weights.
        reason: ``start`` of a run, after a training ``step``, or ``resume`` from a checkpoint.
    """

    version: int
    optimizer_step: int
    reason: Literal["start", "step", "resume"]


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
