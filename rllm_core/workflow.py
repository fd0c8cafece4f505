"""Workflows: environments with rewards, which turn a task into an episode."""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, overload

from pydantic import BaseModel, ConfigDict

from rllm_core.engine import Completer
from rllm_core.parser import ToolSpec
from rllm_core.services import Services
from rllm_core.types import Episode, Step, Task, TerminationReason, Trajectory

Split = Literal["train", "validation"]
Conversation = list[dict[str, Any]]
ENDLESS = sys.maxsize
"""Length of an endless sequence of tasks: the largest value that ``len`` can return."""
LAZY_TASKS_KEPT = 4096


class WorkflowConfig(BaseModel):
    """Base class for a workflow's section of the run file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, kw_only=True)
class ChatTools:
    """The tools of one conversation in ``rllm-core chat``, the same as in a rollout.

    Attributes:
        specs: Tools to describe in the prompt; empty if the model was trained without a description.
        call: Executes a call. Gets the name and the arguments as the model wrote them, any JSON value, and returns the
            result, or an error message that the model can read.
    """

    specs: Sequence[ToolSpec]
    call: Callable[[str, Any], Awaitable[str]]


class LazyTasks(Sequence[Task]):
    """Tasks that are created on demand, for splits that are endless or whose tasks take long to create.

        def tasks(self, split):
            offset = 0 if split == "train" else 1_000_000
            return LazyTasks(lambda number: self.made(offset + number), 500 if split == "validation" else None)

    Args:
        make: Function that creates the task at a position, from 0. Equal positions must give equal tasks, and different
            positions different ids.
        length: Number of tasks; None for an endless split, whose ``len`` is `ENDLESS`.
    """

    def __init__(self, make: Callable[[int], Task], length: int | None = None) -> None:
        self._make = lru_cache(LAZY_TASKS_KEPT)(make)
        self._length = ENDLESS if length is None else length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"task {index} of {self._length}")
        return self._make(index % self._length)


class Workflow(ABC):
    """An environment and its reward.

    One instance serves all rollouts of a run concurrently, so keep the state of `run` in local variables. Let errors
    and timeouts propagate: the core turns any exception into an episode with a termination reason, never a reward.

        class Echo(Workflow):
            name = "echo"

            def tasks(self, split):
                words = ["hello", "world"] if split == "train" else ["held out"]
                return [Task(task_id=word, data={"word": word}) for word in words]

            async def run(self, task, completer):
                step = await completer.complete([{"role": "user", "content": task.data["word"]}])
                return self.episode(task, [step], reward=float(step.text == task.data["word"]))

    Attributes:
        name: Name that selects the workflow, and name of its section in the run file.
        config_model: Pydantic model of that section.
        samples: Whether the workflow calls the model. If False, its rollouts hold example conversations, and all
            rollouts of a task are equal.
        services: Reward functions by name, and the sandbox of the run file. Set before `tasks` is called.
    """

    name: ClassVar[str]
    config_model: ClassVar[type[WorkflowConfig]] = WorkflowConfig
    samples: ClassVar[bool] = True

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        self.config = config if config is not None else self.config_model()
        self.services = Services()

    async def open(self) -> None:  # noqa: B027 - most workflows own nothing
        """Starts shared resources such as servers. Called before the first rollout, in its event loop."""

    async def close(self) -> None:  # noqa: B027
        """Stops what `open` started. Called after the last rollout has ended, and also if `open` failed."""

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[Task]:
        """Tasks of a split, in a stable order, with ids that are unique in the workflow.

        Usually a list. A sequence that creates tasks on demand, such as `LazyTasks`, may have any length. A generator
        is converted to a list.

        Raises:
            rllm_core.config.ConfigError: If a row lacks a field; the message names the row and the field.
        """

    @abstractmethod
    async def run(self, task: Task, completer: Completer) -> Episode:
        """Runs one rollout of a task.

        Args:
            task: The task, read-only and shared between rollouts.
            completer: One conversation with the policy. ``completer.fork()`` opens another.

        Returns:
            The episode with rewarded trajectories. The core fills in the ids of the rollout.
        """

    def group_of(self, episode: Episode, trajectory: Trajectory) -> str:
        """Name of the advantage group of a trajectory, among the groups of its task. Defaults to the role.

        The advantage of a trajectory is relative to the other trajectories in its group, in every training mode.
        """
        return trajectory.role

    def warm_start(self, rng: random.Random) -> Iterator[Conversation] | None:
        """Endless conversations that teach a model made from scratch the form of answers, not which answers are good.

        A conversation is a list of messages such as ``{"role": "user", "content": "..."}``; those of the assistant are
        learned. Backend ``local`` makes its starter model from them if ``model.path`` is empty; otherwise this is not
        called. None if the workflow has none: then the run starts from the backend's own starter model.

        Args:
            rng: Source of all randomness; equal states yield equal conversations, whose hash identifies the model.
        """
        return None

    def chat_tools(self, seed: int) -> ChatTools | None:
        """Tools for one conversation in ``rllm-core chat``; called after `open`. None if the workflow has none.

        Args:
            seed: Seed of the conversation, for tools with randomness.
        """
        return None

    @staticmethod
    def episode(
        task: Task,
        steps: Sequence[Step],
        *,
        reward: float | None = None,
        is_correct: bool | None = None,
        termination_reason: TerminationReason = TerminationReason.DONE,
        metrics: dict[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Episode:
        """Builds the episode of a workflow with one agent. ``reward=None`` means the sum of the steps' rewards."""
        listed = [] if isinstance(steps, Step) else list(steps)
        if isinstance(steps, Step) or not all(isinstance(step, Step) for step in listed):
            got = "a list with " + ", ".join(sorted({type(step).__name__ for step in listed})) if listed else "one Step"
            raise TypeError(
                f"steps is {got}; it must be a list of what completer.complete() returned, such as "
                "[await completer.complete(messages)]"
            )
        return Episode(
            task_id=task.task_id,
            trajectories=[Trajectory(steps=listed, reward=reward)],
            is_correct=is_correct,
            termination_reason=termination_reason,
            metrics=metrics or {},
            metadata=metadata or {},
        )
