"""Words one by one in one conversation; the starter model knows the question, but not the wanted order."""

import random
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rllm_core.engine import Completer
from rllm_core.types import Episode, FinishReason, Messages, Step, Task, TerminationReason
from rllm_core.workflow import Split, Workflow, WorkflowConfig


class RelayConfig(WorkflowConfig):
    """``[relay]``: the words and how many of them a rollout is asked for."""

    letters: Annotated[str, Field(min_length=4, description="The alphabet.")] = "abcdefgh"
    turns: Annotated[int, Field(ge=1, le=8, description="Words per rollout.")] = 2
    tasks: Annotated[int, Field(ge=8, description="Tasks per split.")] = 400
    judged_by: Annotated[str, Field(description="The reward function: ours, or that of another plugin.")] = (
        "letters_in_place"
    )


class Relay(Workflow):
    """Prompt ``sort: dbca``, answer ``dcba``, and so on with the next word."""

    name: ClassVar[str] = "relay"
    config_model: ClassVar[type[WorkflowConfig]] = RelayConfig
    config: RelayConfig

    async def open(self) -> None:
        self.judge = self.services.reward_function(self.config.judged_by)

    def tasks(self, split: Split) -> Sequence[Task]:
        rng = random.Random(split)
        return [self._task(f"{split}-{number}", rng) for number in range(self.config.tasks)]

    def _task(self, task_id: str, rng: random.Random) -> Task:
        words = ["".join(rng.sample(self.config.letters, k=4)) for _ in range(self.config.turns)]
        return Task(task_id=task_id, data={"words": words})

    async def run(self, task: Task, completer: Completer) -> Episode:
        messages, reason = Messages([]), TerminationReason.DONE
        steps: list[Step] = []
        for word in task.data["words"]:
            messages.append({"role": "user", "content": f"sort: {word}"})
            step = await completer.complete(messages)
            answer = Task(task_id=task.task_id, data={"answer": "".join(sorted(word, reverse=True))})
            step.reward = await self.judge(answer, step.text)
            messages.append(step.response)
            steps.append(step)
            if step.finish_reason is FinishReason.LENGTH:
                step.reward, reason = 0.0, TerminationReason.MAX_RESPONSE_TOKENS
                break
        solved = len(steps) == len(task.data["words"]) and all(step.reward == 1.0 for step in steps)
        return self.episode(task, steps, is_correct=solved, termination_reason=reason)


def run_file() -> dict[str, Any]:
    """Learns on the starter model in half a minute on one CPU core."""
    return {
        "training": {"steps": 100, "groups_per_step": 16, "rollouts_per_group": 16},
        "rollout": {"max_response_tokens": 6},
        "algorithm": {"name": "return_to_go", "entropy_coefficient": 0.002},
        "optimizer": {"learning_rate": 1e-3},
    }
