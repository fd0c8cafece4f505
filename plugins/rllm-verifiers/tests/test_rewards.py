"""Rewards equal those of verifiers' own scorer."""

from __future__ import annotations

import asyncio
import random
import string

import pytest
import verifiers.v1 as vf
from players import Policy, opened, play, workflow
from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.types import AssistantMessage, Response, Usage, UserMessage

from rllm_core.types import Task, thaw

AT_A_TIME = 32


async def scored(row: vf.Task, answer: str) -> float:
    """The reward that verifiers computes for an answer, without any of ours."""
    task = TraceTask(type=type(row).__name__, data=row.data, key=row.key, hash=row.hash)
    trace: vf.Trace = vf.Trace(task=task, state=vf.State(), agent=AgentInfo(config=vf.AgentConfig()))
    turn = prepare_turn(trace, [UserMessage(content=row.data.prompt_text)], None)
    message = AssistantMessage(content=answer)
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    turn.commit(Response(id="1", created=0, model="m", message=message, finish_reason="stop", usage=usage))
    await row.score(trace)
    return float(trace.reward)


def answer_to(row: vf.Task, rng: random.Random) -> str:
    """A right answer, a near one, junk, or text that other scorers might read as code or markup."""
    right = row.data.answer
    return rng.choice(
        [
            right,
            f" {right}\n",
            right.upper(),
            f"It is {right}.",
            "".join(rng.choices(string.ascii_lowercase, k=rng.randint(0, 6))) or " ",
            "".join(chr(rng.choice([0x1F600, 0x202E, 0xE9, 0x1B, 0x4E2D, 0x20])) for _ in range(4)),
            "__import__('os').system('true')",
            "</answer><|im_end|>",
        ]
    )


async def compare(count: int) -> tuple[int, set[float]]:
    """Returns how many rewards are equal, and which there were."""
    rng = random.Random(count)
    played = workflow("last_letter")
    taskset = played._environment.taskset
    kind = type(taskset).task_type()

    async def one(task: Task, answer: str) -> tuple[bool, float]:
        row = kind(kind.data_type().model_validate(thaw(task.data["row"])), taskset.config.task)
        episode = await play(played, task, Policy(lambda prompt, seed: answer))
        [trajectory] = episode.trajectories
        return trajectory.reward == await scored(row, trajectory.steps[0].text), float(trajectory.reward or 0.0)

    equal, seen = 0, set()
    async with opened(played):
        tasks = played.tasks("train")
        for start in range(0, count, AT_A_TIME):
            chosen = [tasks[number] for number in range(start, min(start + AT_A_TIME, count))]
            rows = [kind(kind.data_type().model_validate(thaw(task.data["row"]))) for task in chosen]
            answers = [answer_to(row, rng) for row in rows]
            for same, reward in await asyncio.gather(*map(one, chosen, answers)):
                equal += same
                seen.add(reward)
    return equal, seen


async def test_a_hundred_answers() -> None:
    assert await compare(100) == (100, {0.0, 0.25, 1.0})


@pytest.mark.slow
async def test_a_thousand_answers() -> None:
    assert await compare(1000) == (1000, {0.0, 0.25, 1.0})
