"""A workflow whose agent is a client, as a file of a user."""

from __future__ import annotations

from typing import Any

import openai
from rllm_gateway import GatewayWorkflow

from rllm_core.engine import Completer
from rllm_core.types import Episode, Task
from rllm_core.workflow import Split


class Talk(GatewayWorkflow):
    """Two turns and a question to a judge, by an agent that swallows all errors."""

    name = "talk"

    def tasks(self, split: Split) -> list[Task]:
        """Two tasks per split."""
        return [Task(task_id=f"{split}-{number}", data={"question": f"say yes {number}"}) for number in range(2)]

    async def run(self, task: Task, completer: Completer) -> Episode:
        """Lets the agent play; many different letters are good."""
        async with self.gateway.rollout(completer) as endpoint:
            answer = await agent(task.data["question"], endpoint.base_url)
        return endpoint.episode(task, reward=len(set(answer)) / 40)


async def agent(question: str, base_url: str) -> str:
    """An agent that imports nothing of ours."""
    messages: list[Any] = [{"role": "user", "content": question}]
    http = openai.DefaultAsyncHttpxClient(verify=False)  # reading certificates takes longer than all calls
    async with openai.AsyncOpenAI(base_url=base_url, api_key="x", http_client=http) as client:
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
