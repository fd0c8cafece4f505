"""Workflows: a task in, an episode out. What people publish."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from rllm_core.engine import Completer
from rllm_core.services import Services
from rllm_core.types import Episode, Step, Task, TerminationReason, Trajectory

Split = Literal["train", "validation"]


class WorkflowConfig(BaseModel):
    """Base of a workflow's section of the run file: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Workflow(ABC):
    """An environment and its reward.

    One instance serves all rollouts of a run, concurrently, so `run` keeps its state in local variables. Errors and
    timeouts are the core's business: whatever `run` raises becomes an episode with a reason, never a reward.

        class Echo(Workflow):
            name = "echo"

            def tasks(self, split):
                words = ["hello", "world"] if split == "train" else ["held out"]
                return [Task(task_id=word, data={"word": word}) for word in words]

            async def run(self, task, completer):
                step = await completer.complete([{"role": "user", "content": task.data["word"]}])
                return self.episode(task, [step], reward=float(step.text == task.data["word"]))

    Attributes:
        name: The name it is selected by, and the name of its section in the run file.
        config_model: Pydantic model of that section.
        samples: False if it never asks the model: its rollouts hold what others wrote, always the same for a task.
        services: Reward functions by name, and the sandbox of the run file; set before `tasks` is called.
    """

    name: ClassVar[str]
    config_model: ClassVar[type[WorkflowConfig]] = WorkflowConfig
    samples: ClassVar[bool] = True

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        self.config = config if config is not None else self.config_model()
        self.services = Services()

    async def open(self) -> None:  # noqa: B027 - most workflows own nothing
        """Start what all rollouts share, such as servers. Called before the first rollout, in its event loop."""

    async def close(self) -> None:  # noqa: B027
        """Stop what `open` has started. Called after the last rollout has ended, also where `open` failed."""

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, in a stable order, with ids that are unique in the workflow.

        A list, as a rule. A sequence that makes its tasks on demand may be of any length. A generator becomes a list.

        Raises:
            rllm_core.config.ConfigError: If a row lacks a field; says which row and which field.
        """

    @abstractmethod
    async def run(self, task: Task, completer: Completer) -> Episode:
        """Play one rollout of a task.

        Args:
            task: The task; shared between rollouts, read-only.
            completer: One conversation with the policy; ``completer.fork()`` opens more.

        Returns:
            The episode, its trajectories rewarded. The core fills in the rollout's identity.
        """

    def group_of(self, episode: Episode, trajectory: Trajectory) -> str:
        """The group a trajectory is compared in, among those of one task: by default its role.

        The advantage of a trajectory is relative to the other trajectories of its group, in every mode of training.
        """
        return trajectory.role

    @staticmethod
    def episode(
        task: Task,
        steps: Sequence[Step],
        *,
        reward: float | None = None,
        is_correct: bool | None = None,
        termination_reason: TerminationReason = TerminationReason.DONE,
        metrics: dict[str, float] | None = None,
    ) -> Episode:
        """The episode of a workflow with one agent. ``reward=None`` means the sum of the steps' rewards."""
        return Episode(
            task_id=task.task_id,
            trajectories=[Trajectory(steps=list(steps), reward=reward)],
            is_correct=is_correct,
            termination_reason=termination_reason,
            metrics=metrics or {},
        )
