"""Joins several workflows into one, so that a run can train on a mixture of them."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import cycle

from rllm_core.engine import Completer
from rllm_core.services import Services
from rllm_core.types import Episode, Task, Trajectory
from rllm_core.workflow import ENDLESS, Conversation, Split, Workflow


class JoinedWorkflow(Workflow):
    """Base class of a workflow that joins the tasks of several workflows, or of several variants of one.

    Each task has the id ``NAME/ID``, and the data ``subset`` (name of its workflow), ``task_id`` and ``data``. Task
    samplers ``mixture`` and ``stages`` find the names under the key ``subset``.

        class Puzzles(JoinedWorkflow):
            name = "puzzles"

            def workflows(self):
                return {"sort": SortWorkflow(), "long": SortWorkflow(SortConfig(length=5)), "guess": GuessWorkflow()}
    """

    @abstractmethod
    def workflows(self) -> Mapping[str, Workflow]:
        """Returns the workflows by name, without ``/`` in the names. Called once."""

    @cached_property
    def _joined(self) -> Mapping[str, Workflow]:
        workflows = self.workflows()
        if wrong := [name for name in workflows if "/" in name]:
            raise ValueError(f"workflows() of {type(self).__name__}: the name {wrong[0]!r} has a '/'; use another name")
        return workflows

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns the tasks of all workflows, in the order of the workflows.

        Raises:
            ValueError: If a workflow has endless tasks.
        """
        tasks = []
        for name, workflow in self._serving():
            found = workflow.tasks(split)
            if len(found) == ENDLESS:
                raise ValueError(f"workflow {name!r} has endless {split} tasks, which cannot be joined to others")
            for task in found:
                data = {"subset": name, "task_id": task.task_id, "data": task.data}
                tasks.append(Task(task_id=f"{name}/{task.task_id}", data=data))
        return tasks

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Runs the workflow that a task belongs to; adds its reward, and whether it was solved, to its own metrics."""
        own = Task(task_id=task.data["task_id"], data=task.data["data"])
        episode = await self._joined[task.data["subset"]].run(own, completer)
        results = {"reward": episode.reward, "solved": episode.is_correct}
        found = {name: float(value) for name, value in results.items() if value is not None} | episode.metrics
        metrics = {f"{task.data['subset']}/{name}": value for name, value in found.items()}
        return episode.model_copy(update={"task_id": task.task_id, "metrics": metrics})

    def group_of(self, episode: Episode, trajectory: Trajectory) -> str:
        """Asks the workflow of the episode's task for the group name."""
        name, _, own = episode.task_id.partition("/")
        return self._joined[name].group_of(episode.model_copy(update={"task_id": own}), trajectory)

    def warm_start(self, rng: random.Random) -> Iterator[Conversation] | None:
        """Alternates between the warm-start conversations of the workflows that have some."""
        found = [workflow.warm_start(rng) for workflow in self._joined.values()]
        turns = [conversations for conversations in found if conversations is not None]
        return (next(conversations) for conversations in cycle(turns)) if turns else None

    async def open(self) -> None:
        """Opens all workflows."""
        for _, workflow in self._serving():
            await workflow.open()

    async def close(self) -> None:
        """Closes all workflows, in reverse order."""
        for workflow in reversed(list(self._joined.values())):
            await workflow.close()

    def _serving(self) -> Iterator[tuple[str, Workflow]]:
        """Yields the workflows, each given this workflow's services, which are set only after construction."""
        services: Services = self.services
        for name, workflow in self._joined.items():
            workflow.services = services
            yield name, workflow
