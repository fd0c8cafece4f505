"""Contract of task samplers, which choose the tasks of a run and learn from the results of earlier ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import numpy as np

from rllm_core.algorithms.options import Configured
from rllm_core.errors import ConfigError
from rllm_core.types import Task

Outcome = Literal["trained", "filtered", "failed", "skipped"]


@dataclass(frozen=True)
class GroupResult:
    """Result of a task that `TaskSampler.next` returned.

    Attributes:
        ordinal: Number of the task in the order of `TaskSampler.next`, from 0.
        position: Position of the task among the training tasks.
        outcome: ``trained``, ``filtered``, ``failed``, or ``skipped`` for a task in quarantine, which is never started
            again.
        reason: Reason of the outcome, as in the rollout accounting.
        solved: Share of the group's rollouts that are correct; None if the workflow does not determine this.
        rewards: ``(rollouts,)`` reward of each rollout that has one: the mean of its trajectories.
        weight_version: Oldest weight version that sampled any of the group's tokens.
        step: Optimizer steps done when the sampler gets the result.
    """

    ordinal: int
    position: int
    outcome: Outcome
    reason: str
    solved: float | None
    rewards: tuple[float, ...]
    weight_version: int
    step: int


class TaskSampler(Configured, ABC):
    """Chooses the tasks of a run; selected by ``training.sampler``, with options in ``training.sampler_options``.

    Attributes:
        epoch_tasks: Number of tasks in a pass over the tasks; None if passes have no meaning, so that the epoch stays
            0. Set it in `begin` if it depends on the tasks.
    """

    epoch_tasks: int | None = None

    @abstractmethod
    def begin(self, tasks: Sequence[Task], seed: int) -> None:
        """Starts a run. Called before all other methods.

        Args:
            tasks: Training tasks, at least one. They may be endless: then ``len`` is `rllm_core.workflow.ENDLESS`.
            seed: Seed of the run, from which every random choice derives.

        Raises:
            rllm_core.errors.ConfigError: If the options do not fit the tasks.
        """

    @abstractmethod
    def next(self, n: int) -> Sequence[int]:
        """Returns the positions of the next ``n`` tasks, given the results observed so far.

        ``next(a)`` and then ``next(b)`` is the same as ``next(a + b)``. A task may come again before its result is
        known.
        """

    def observe(self, result: GroupResult) -> None:
        """Takes the result of a task.

        The results of a sync window arrive together, sorted by `GroupResult.ordinal`, before the first task of the next
        window is drawn. In synchronous training, all results so far have then arrived. In asynchronous training, some
        arrive windows later, after results of tasks that were drawn later. Each result arrives once, even if the run is
        resumed. A ``skipped`` result arrives immediately.
        """

    def metrics(self) -> Mapping[str, float]:
        """Returns numbers to record with each optimizer step, as ``sampler/NAME``."""
        return {}

    @abstractmethod
    def state_dict(self) -> Mapping[str, Any]:
        """Returns the state for a checkpoint, as JSON."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint, after `begin`; the next tasks are then the same as without a restart.

        Raises:
            rllm_core.errors.ConfigError: If the state belongs to other tasks.
        """


def checked_positions(returned: object, n: int, tasks: Sequence[Task]) -> list[int]:
    """Checks the return value of `TaskSampler.next`, and returns it as a list.

    Raises:
        ValueError: If the value is not ``n`` positions of tasks.
    """
    if isinstance(returned, np.ndarray):  # a random generator of numpy draws arrays
        returned = returned.tolist()
    if not isinstance(returned, Sequence) or isinstance(returned, str):
        raise ValueError(f"next({n}) returned {type(returned).__name__}, not a list of positions")
    if len(returned) != n:
        raise ValueError(f"next({n}) returned {len(returned)} positions")
    for position in returned:
        if isinstance(position, bool) or not isinstance(position, Integral) or not 0 <= int(position) < len(tasks):
            raise ValueError(f"next({n}) returned position {position!r:.80} of {len(tasks)} tasks")
    return [int(position) for position in returned]


def check_same_tasks(before: int | None, now: int) -> None:
    """Checks the number of training tasks of a resumed run, since its state has their positions.

    Args:
        before: Number of tasks in the checkpoint; None in checkpoints of earlier versions.
        now: Number of tasks.

    Raises:
        ConfigError: If it has changed.
    """
    if before not in (None, now):
        raise ConfigError(
            f"the checkpoint has {before} training tasks, but there are {now}; resume with the same tasks, or start a "
            "new run from its weights with --init-from"
        )
