"""``placeholder``: spell a word backwards. Tasks, reward and training settings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator
from rllm_core.engine import Completer
from rllm_core.types import Episode, FinishReason, Task, TerminationReason
from rllm_core.workflow import Split, Workflow, WorkflowConfig

WORD_LETTERS = 4
HELD_OUT_ONE_IN = 7


class PlaceholderConfig(WorkflowConfig):
    """Section ``[placeholder]`` of the run file."""

    letters: Annotated[str, Field(min_length=5, max_length=12, description="Letters of the words.")] = "abcdefgh"

    @field_validator("letters")
    @classmethod
    def _check_letters(cls, letters: str) -> str:
        if len(set(letters)) != len(letters):
            raise ValueError("letters must not repeat")
        return letters


class PlaceholderWorkflow(Workflow):
    """Prompt ``sort: dbca``, answer ``acbd``.

    The starter model only knows the prompt ``sort: WORD``, and answers with the letters in random order. The reward
    teaches it to reverse them.
    """

    name: ClassVar[str] = "placeholder"
    config_model: ClassVar[type[WorkflowConfig]] = PlaceholderConfig
    config: PlaceholderConfig

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns all words of a split, always with the same ids in the same order."""
        words = ["".join(letters) for letters in itertools.permutations(self.config.letters, WORD_LETTERS)]
        return [
            Task(task_id=word, data={"word": word, "answer": word[::-1]})
            for place, word in enumerate(words)
            if (place % HELD_OUT_ONE_IN == 0) == (split == "validation")
        ]

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Runs one rollout. Many run at once on this object, so keep their data in local variables."""
        step = await completer.complete([{"role": "user", "content": f"sort: {task.data['word']}"}])
        is_cut_off = step.finish_reason is FinishReason.LENGTH
        reward = 0.0 if is_cut_off else score(step.text, task.data["answer"])
        return self.episode(
            task,
            [step],
            reward=reward,
            is_correct=reward == 1.0,
            termination_reason=TerminationReason.MAX_RESPONSE_TOKENS if is_cut_off else TerminationReason.DONE,
        )


def score(given: str, answer: str) -> float:
    """Returns 1 for the answer, half the share of correct letters for the right length, otherwise 0."""
    if given == answer:
        return 1.0
    if len(given) != len(answer):
        return 0.0
    return 0.5 * sum(map(str.__eq__, given, answer)) / len(answer)


def run_file() -> dict[str, Any]:
    """Returns settings that are known to work, so training needs no run file."""
    return {
        "training": {"steps": 100, "groups_per_step": 16, "rollouts_per_group": 16},
        "rollout": {"max_response_tokens": 6},
        "algorithm": {"entropy_coefficient": 0.002},
        "optimizer": {"learning_rate": 1e-3},
    }
