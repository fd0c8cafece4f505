"""A conversation of equal turns with a known amount of computation, to run in any rollout host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from rllm_core import hookimpl
from rllm_core.engine import Completer
from rllm_core.providers import WorkflowProvider
from rllm_core.types import Episode, Messages, Step, Task
from rllm_core.workflow import Split, Workflow, WorkflowConfig

CHARACTERS = 200
SAID = "a word of the user; " * (CHARACTERS // 20)


class TalkConfig(WorkflowConfig):
    """``[talk]``.

    Attributes:
        tasks: Number of tasks.
        turns: Model calls per rollout.
        work_seconds: CPU time that the workflow needs for each turn.
    """

    tasks: int = 1
    turns: int = 1
    work_seconds: float = 0.0


class Talk(Workflow):
    """Writes 200 characters per turn. Rollouts have different prompts, so they share no calls."""

    name: ClassVar[str] = "talk"
    config_model: ClassVar[type[WorkflowConfig]] = TalkConfig
    config: TalkConfig

    def tasks(self, split: Split) -> Sequence[Task]:
        """See `Workflow.tasks`."""
        return [Task(task_id=f"{split}-{number}") for number in range(self.config.tasks)]

    async def run(self, task: Task, completer: Completer) -> Episode:
        """See `Workflow.run`."""
        messages = Messages([{"role": "user", "content": f"{task.task_id} {SAID}"}])
        steps: list[Step] = []
        for _ in range(self.config.turns):
            if steps:
                messages += [steps[-1].response, {"role": "user", "content": SAID}]
            steps.append(await completer.complete(messages))
            if self.config.work_seconds:  # reading the clock would count as a cost of inline rollouts
                compute(self.config.work_seconds)
        return self.episode(task, steps, reward=1.0)


def compute(seconds: float) -> None:
    """Uses this much CPU time, however busy the machine is."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@hookimpl
def workflows() -> list[WorkflowProvider]:
    """The workflow above."""
    about: dict[str, Any] = {"config": f"{__name__}:TalkConfig", "summary": "Equal turns with a known cost."}
    return [WorkflowProvider(name="talk", load=f"{__name__}:Talk", **about)]
