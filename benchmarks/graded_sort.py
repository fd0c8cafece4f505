"""Workflow of `benchmarks.curriculum`: words of 2 to 12 letters to sort. Only the exact answer has a reward."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from rllm_workflows.sort import is_held_out, prompt

from rllm_core.engine import Completer
from rllm_core.types import Episode, Messages, Task
from rllm_core.workflow import Conversation, Split, Workflow, WorkflowConfig

MAX_WORDS = 5000


class GradedSortConfig(WorkflowConfig):
    """``[graded_sort]``: the words."""

    letters: Annotated[str, Field(min_length=2, description="The alphabet, in sort order.")] = "abcdefghijklmnop"
    lengths: Annotated[tuple[int, ...], Field(min_length=1, description="Lengths of the words.")] = tuple(range(2, 13))
    train: Annotated[int, Field(ge=1, description="Maximum number of training words of each length.")] = 500
    validation: Annotated[int, Field(ge=1, description="Maximum number of held-out words of each length.")] = 60


class GradedSort(Workflow):
    """The reward is 1 for the exact answer, otherwise 0: a long word teaches nothing until it is solved by chance."""

    name: ClassVar[str] = "graded_sort"
    config_model: ClassVar[type[WorkflowConfig]] = GradedSortConfig
    config: GradedSortConfig

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        super().__init__(config)
        self._tasks: dict[Split, list[Task]] = {"train": [], "validation": []}
        most: dict[Split, int] = {"train": self.config.train, "validation": self.config.validation}
        for length in self.config.lengths:
            words = _words(self.config.letters, length)
            of_split: dict[Split, list[str]] = {"train": [], "validation": []}
            for word in words:
                of_split["validation" if is_held_out(word) else "train"].append(word)
            for split, found in of_split.items():
                self._tasks[split] += [self._task(word) for word in found[: most[split]]]

    def _task(self, word: str) -> Task:
        answer = "".join(sorted(word, key=self.config.letters.index))
        return Task(task_id=f"sort-{word}", data={"word": word, "answer": answer, "length": len(word)})

    def warm_start(self, rng: random.Random) -> Iterator[Conversation]:
        """Yields words of all lengths, answered by their letters in random order."""
        while True:
            letters = rng.choices(self.config.letters, k=rng.choice(self.config.lengths))
            question = prompt("".join(letters))
            rng.shuffle(letters)
            yield [{"role": "user", "content": question}, {"role": "assistant", "content": "".join(letters)}]

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns the words of a split, shorter ones first."""
        return self._tasks[split]

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Asks the question and compares the answer."""
        step = await completer.complete(Messages([{"role": "user", "content": prompt(task.data["word"])}]))
        is_correct = step.text.strip() == task.data["answer"]
        solved_of_length = {f"solved_{task.data['length']}": float(is_correct)}
        return self.episode(task, [step], reward=float(is_correct), is_correct=is_correct, metrics=solved_of_length)


def _words(letters: str, length: int) -> list[str]:
    """Returns different words in random order, the same each time: all of a length, or `MAX_WORDS`."""
    rng = random.Random(length)
    if len(letters) ** length > MAX_WORDS:
        return list(dict.fromkeys("".join(rng.choices(letters, k=length)) for _ in range(MAX_WORDS)))
    words = ["".join(word) for word in itertools.product(letters, repeat=length)]
    rng.shuffle(words)
    return words


def run_file() -> dict[str, Any]:
    """Settings of the benchmark: those of ``sort``, with a constant learning rate, since arms end at different steps.

    The first steps need many groups: hardly a task is solved by chance.
    """
    return {
        "training": {
            "groups_per_step": 16,
            "rollouts_per_group": 8,
            "validate_every_steps": 5,
            "validation_rollouts": 631,
            "groups_kept_per_step": 0,
        },
        "rollout": {"max_response_tokens": 14, "validation_temperature": 0.0},
        "algorithm": {
            "name": "grpo",
            "entropy_coefficient": 0.002,
            "filter_uniform_groups": True,
            "max_group_attempts": 100,
        },
        "optimizer": {"learning_rate": 1e-3, "schedule": "constant", "warmup_steps": 5},
    }
