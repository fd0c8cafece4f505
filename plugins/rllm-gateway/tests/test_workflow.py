"""Tests workflows whose agent is a client, in the process of the run and in a worker."""

from __future__ import annotations

from typing import Any

import openai

from rllm_core.engine import Completer
from rllm_core.types import Episode, Task
from rllm_core.workflow import Split
from rllm_devkit.checks import check_workflow
from rllm_gateway import GatewayWorkflow


class Talk(GatewayWorkflow):
    """Two turns and a question to a judge, by an agent that swallows all errors."""

    name = "talk"

    def tasks(self, split: Split) -> list[Task]:
        """Two tasks per split."""
        return [Task(task_id=f"{split}-{number}", data={"question": f"say yes {number}"}) for number in range(2)]

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Lets the agent play."""
        async with self.gateway.rollout(completer) as endpoint:
            answer = await agent(task.data["question"], endpoint.base_url)
        return endpoint.episode(task, reward=float("yes" in answer))


async def agent(question: str, base_url: str) -> str:
    """An agent that imports nothing of ours."""
    messages: list[Any] = [{"role": "user", "content": question}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key="x") as client:
        try:
            for _ in range(2):
                completion = await client.chat.completions.create(model="solver", messages=messages)
                messages.append(completion.choices[0].message.model_dump(exclude_none=True))
                messages.append({"role": "user", "content": "once more"})
            judge = [{"role": "user", "content": f"is this right: {messages[-2]['content']}"}]
            await client.chat.completions.create(model="judge", messages=judge)
        except Exception:  # as agents do
            return ""
    return str(messages[-2]["content"])


async def test_a_workflow_with_a_gateway_passes_all_checks() -> None:
    results = await check_workflow(Talk, answers=["yes", "no"])
    assert [f"{result.name}: {result.detail}" for result in results if result.outcome == "failed"] == []
    assert "steps" in {result.name for result in results if result.outcome == "passed"}
