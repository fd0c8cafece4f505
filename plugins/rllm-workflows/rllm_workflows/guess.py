"""``guess``: find a secret number from higher/lower feedback within a few turns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from rllm_core.engine import Completer
from rllm_core.types import Episode, FinishReason, Messages, Step, Task, TerminationReason
from rllm_core.workflow import Split, Workflow, WorkflowConfig

_NUMBER = re.compile(r"[0-9]{1,4}")

SOLVED, MISSED, INVALID = 1.0, 0.0, -1.0


class GuessConfig(WorkflowConfig):
    """``[guess]``: the range of the secret number and the number of guesses."""

    low: Annotated[int, Field(ge=0, le=999, description="Smallest secret number.")] = 1
    high: Annotated[int, Field(ge=0, le=999, description="Largest secret number.")] = 5
    turns: Annotated[int, Field(ge=1, le=100, description="Guesses per rollout.")] = 3

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be less than high = {self.high}")
        return self


def prompt(low: int, high: int) -> str:
    """Returns the first question to the model."""
    return f"{low}-{high}?"


def feedback(guess: int, secret: int) -> str:
    """Returns the reply to a wrong guess."""
    return "higher" if guess < secret else "lower"


class GuessWorkflow(Workflow):
    """Multi-turn game: the prompt is ``1-5?``, the model guesses, and ``higher`` or ``lower`` follows.

    From the second turn on, an answer must repeat the last guess and its feedback before the new guess: ``3higher5``.
    This echo makes the task easier, because the model writes down what it knows before it decides.

    The reward depends on the outcome only: 1 if the secret was found, 0 if the turns ran out, -1 for an answer in the
    wrong format. The wrong format costs most, so that an invalid answer is not a cheap way out. A guess outside the
    range is valid but wasted.

    Both splits contain every secret, under different ids. The prompt is the same in every task and does not reveal the
    secret, so no item can be held out: a policy that never met some secret would have learned to rule it out.
    Validation measures how well the strategy works on fresh rollouts, not whether it transfers to other ranges.
    """

    name: ClassVar[str] = "guess"
    config_model: ClassVar[type[WorkflowConfig]] = GuessConfig
    config: GuessConfig

    def __init__(self, config: WorkflowConfig | None = None) -> None:
        super().__init__(config)
        self._opening = Messages([{"role": "user", "content": prompt(self.config.low, self.config.high)}])

    def tasks(self, split: Split) -> Sequence[Task]:
        """Returns one task per secret."""
        return [
            Task(task_id=f"guess-{split}-{secret}", data={"secret": secret})
            for secret in range(self.config.low, self.config.high + 1)
        ]

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Runs turns until the secret is found, the turns run out, or an answer is invalid."""
        secret: int = task.data["secret"]
        messages = self._opening.copy()
        steps: list[Step] = []
        echo = ""
        while True:
            step = await completer.complete(messages)
            steps.append(step)
            if step.finish_reason is FinishReason.LENGTH:
                return self._end(task, steps, INVALID, TerminationReason.MAX_RESPONSE_TOKENS)
            guess = parse_guess(step.text, echo)
            if guess is None:
                return self._end(task, steps, INVALID)
            if guess == secret:
                return self._end(task, steps, SOLVED)
            if len(steps) == self.config.turns:
                return self._end(task, steps, MISSED, TerminationReason.MAX_TURNS)
            said = feedback(guess, secret)
            echo = f"{guess}{said}"
            messages.append(step.response)
            messages.append({"role": "user", "content": said})

    def _end(
        self, task: Task, steps: list[Step], reward: float, reason: TerminationReason = TerminationReason.DONE
    ) -> Episode:
        return self.episode(
            task,
            steps,
            reward=reward,
            is_correct=reward == SOLVED,
            termination_reason=reason,
            metrics={"turns": float(len(steps)), "invalid": float(reward == INVALID)},
        )


def parse_guess(answer: str, echo: str) -> int | None:
    """Returns the guess in an answer, or None if the answer is not ``echo`` followed by a number."""
    answer = answer.strip()
    number = answer[len(echo) :]
    return int(number) if answer.startswith(echo) and _NUMBER.fullmatch(number) else None


def run_file() -> dict[str, Any]:
    """Returns settings for backend ``local``; every tried seed learned in about half a minute on one CPU core."""
    return {
        "training": {"steps": 250, "groups_per_step": 25, "rollouts_per_group": 8},
        "rollout": {"max_response_tokens": 6},
        "algorithm": {
            "name": "return_to_go",
            "estimator_options": {"baseline": "state"},
            "entropy_coefficient": 0.08,
            "entropy_coefficient_final": 0.0,
        },
        "optimizer": {
            "learning_rate": 1e-3,
            "schedule": "linear",
            "warmup_steps": 5,
            "final_learning_rate_fraction": 0.1,
        },
    }
