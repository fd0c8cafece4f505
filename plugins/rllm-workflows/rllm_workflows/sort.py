"""``sort``: put the letters of a short word in order. Single turn; a CPU learns it in seconds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from rllm_core.engine import Completer
from rllm_core.types import Episode, FinishReason, Messages, Task, TerminationReason
from rllm_core.workflow import Split, Workflow, WorkflowConfig

HELD_OUT_ONE_IN = 7
MAX_WORDS = 100_000


class SortConfig(WorkflowConfig):
    """``[sort]``: the words. All ``len(letters) ** length`` of them are used."""

    letters: Annotated[str, Field(min_length=2, description="The alphabet, in sort order.")] = "abcdefgh"
    length: Annotated[int, Field(ge=2, le=16, description="Letters per word. Letters may repeat.")] = 4

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.letters)) != len(self.letters) or not all(c.isalnum() for c in self.letters):
            raise ValueError(f"letters = {self.letters!r} must be distinct letters or digits")
        if len(self.letters) ** self.length > MAX_WORDS:
            raise ValueError(
                f"{len(self.letters)} letters and length {self.length} make more than {MAX_WORDS:,} words; "
                "use fewer letters or shorter words"
            )
        return self


def is_held_out(word: str) -> bool:
    """Returns whether a word is in the validation split: about one in seven, by a machine-independent hash."""
    digest = blake2b(f"sort:{word}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def prompt(word: str) -> str:
    """Returns the question to the model."""
    return f"sort: {word}"


class SortWorkflow(Workflow):
    """Single-turn task: the prompt is ``sort: dbca``, the answer ``abcd``.

    The reward is 1 for the exact answer, otherwise half the share of correct positions. It is 0 if the length is wrong
    or the completion was truncated. Only the exact answer counts as correct. ``letters`` defines the order.
    """

    name: ClassVar[str] = "sort"
    config_model: ClassVar[type[WorkflowConfig]] = SortConfig
    config: SortConfig

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        super().__init__(config)
        self._tasks: dict[Split, list[Task]] = {"train": [], "validation": []}
        self._asked: dict[str, Messages] = {}
        for letters in itertools.product(self.config.letters, repeat=self.config.length):
            word = "".join(letters)
            answer = "".join(sorted(word, key=self.config.letters.index))
            task = Task(task_id=f"sort-{word}", data={"word": word, "answer": answer})
            self._tasks["validation" if is_held_out(word) else "train"].append(task)
            self._asked[word] = Messages([{"role": "user", "content": prompt(word)}])

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns all words of a split, in alphabetical order."""
        return self._tasks[split]

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Asks the question and scores the answer."""
        step = await completer.complete(self._asked[task.data["word"]])
        is_cut_off = step.finish_reason is FinishReason.LENGTH
        reward = 0.0 if is_cut_off else score(step.text.strip(), task.data["answer"])
        return self.episode(
            task,
            [step],
            reward=reward,
            is_correct=reward == 1.0,
            termination_reason=TerminationReason.MAX_RESPONSE_TOKENS if is_cut_off else TerminationReason.DONE,
        )


def score(given: str, answer: str) -> float:
    """Returns 1 for the exact answer, otherwise half the share of correct positions, or 0 for a wrong length."""
    if given == answer:
        return 1.0
    if len(given) != len(answer):
        return 0.0
    return 0.5 * sum(map(str.__eq__, given, answer)) / len(answer)


def run_file() -> dict[str, Any]:
    """Returns settings for backend ``local``; every tried seed learned in under a minute on one CPU core."""
    return {
        "training": {"steps": 250, "groups_per_step": 16, "rollouts_per_group": 16},
        "rollout": {"max_response_tokens": 6},
        "algorithm": {"name": "grpo", "entropy_coefficient": 0.002},
        "optimizer": {
            "learning_rate": 1e-3,
            "schedule": "linear",
            "warmup_steps": 5,
            "final_learning_rate_fraction": 0.02,
        },
    }
