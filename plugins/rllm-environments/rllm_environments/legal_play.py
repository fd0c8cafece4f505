"""Plays for audits: a whole rollout with legal answers, and all checks of a workflow, both with a scripted model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from rllm_core.engine import TITOCompleter
from rllm_core.errors import ConfigError
from rllm_core.types import Episode, SamplingParams, Task
from rllm_core.workflow import Workflow

MAX_ANSWER_TOKENS = 10_000
# Third-party games may compute for a long time, and the machine may be busy.
ROLLOUT_SECONDS = 300.0


def play(workflow: Workflow, task: Task, answer: Callable[[random.Random], str], seed: int = 0) -> Episode:
    """Runs one rollout of a task.

    Args:
        workflow: Workflow to run.
        task: Task of the rollout.
        answer: Returns the model's next answer.
        seed: Seed of the answers.

    Raises:
        ConfigError: If rllm-devkit, which has the scripted engine, is not installed.
    """
    try:
        from rllm_devkit.scripted import Script, ScriptedEngine
    except ModuleNotFoundError as error:
        raise ConfigError("audits play with the scripted engine of rllm-devkit: pip install rllm-devkit") from error
    rng = random.Random(seed)

    class Answers(Script):
        """A script that requests each answer only when it is needed."""

        def __getattribute__(self, name: str) -> Any:
            return answer(rng) if name == "good" else super().__getattribute__(name)

    engine = ScriptedEngine(script=Answers(), skill=1.0)
    params = SamplingParams(max_response_tokens=MAX_ANSWER_TOKENS)
    completer = TITOCompleter(engine, sampling_params=params, seed=seed)
    return asyncio.run(workflow.run(task, completer))


def failed_checks(make: Callable[[], Workflow], answers: Sequence[str]) -> list[str]:
    """Runs all checks of a workflow on one task per split.

    Args:
        make: Constructs the workflow.
        answers: Answers that fit its tasks.

    Returns:
        The failed checks; empty if all passed.
    """
    from rllm_devkit.checks import check_workflow

    results = asyncio.run(
        check_workflow(
            make,
            answers=answers,
            tasks_per_split=1,
            rollout_timeout_seconds=ROLLOUT_SECONDS,
            max_block_seconds=ROLLOUT_SECONDS,
        )
    )
    return [f"check {each.name!r} failed: {each.detail:.200}" for each in results if each.outcome == "failed"]
