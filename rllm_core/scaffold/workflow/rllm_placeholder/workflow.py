"""``placeholder``: spell a word backwards. The tasks, the reward, and settings that learn it."""

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
    """``[placeholder]``: its section of the run file."""

    letters: Annotated[str, Field(min_length=5, max_length=12, description="Words are made of these.")] = "abcdefgh"

    @field_validator("letters")
    @classmethod
    def _check_letters(cls, letters: str) -> str:
        if len(set(letters)) != len(letters):
            raise ValueError("each letter must be there once")
        return letters


class PlaceholderWorkflow(Workflow):
    """Prompt ``sort: dbca``, answer ``acbd``.

    The starter model has only ever been asked ``sort: WORD``, and answers with the letters in random order; that they
    should be in reverse order it learns from the reward.
    """

    name: ClassVar[str] = "placeholder"
    config_model: ClassVar[type[WorkflowConfig]] = PlaceholderConfig
    config: PlaceholderConfig

    def tasks(self, split: Split) -> Sequence[Task]:
        """All words of a split, with the same ids in the same order every time."""
        words = ["".join(letters) for letters in itertools.permutations(self.config.letters, WORD_LETTERS)]
        return [
            Task(task_id=word, data={"word": word, "answer": word[::-1]})
            for place, word in enumerate(words)
            if (place % HELD_OUT_ONE_IN == 0) == (split == "validation")
        ]

    async def run(self, task: Task, completer: Completer) -> Episode:
        """One rollout: ask, score. Many run at once on this object, so what belongs to one is in local variables."""
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
    """1 for the answer, half the share of right letters for one of its length, 0 for anything else."""
    if given == answer:
        return 1.0
    if len(given) != len(answer):
        return 0.0
    return 0.5 * sum(map(str.__eq__, given, answer)) / len(answer)


def run_file() -> dict[str, Any]:
    """Settings that are known to work, so that training needs no run file."""
    return {
        "training": {"steps": 100, "groups_per_step": 16, "rollouts_per_group": 16},
        "rollout": {"max_response_tokens": 6},
        "algorithm": {"entropy_coefficient": 0.002},
        "optimizer": {"learning_rate": 1e-3},
    }
