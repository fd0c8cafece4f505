"""The calculator as an agent of openai-agents. It does not know of training."""

import json
import operator
import random

from agents import Agent, AgentsException, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
CLIENT = AsyncOpenAI(base_url="http://unset", api_key="unset")
NAMES = ("add", "sub", "mul")


async def play(question: str, base_url: str, api_key: str) -> str:
    offset, shown = random.randrange(90), []

    def tool(name):
        def calculate(a: int, b: int) -> str:
            shown.append(str(10 + (getattr(operator, name)(a, b) + offset) % 90))
            return shown[-1]

        return function_tool(calculate, name_override=name)

    model = OpenAIChatCompletionsModel("policy", CLIENT.with_options(base_url=base_url, api_key=api_key))
    agent = Agent(name="calculator", model=model, tools=[tool(name) for name in NAMES])
    try:
        result = await Runner.run(agent, question, max_turns=4)
    except AgentsException as error:  # such as a call of a tool that does not exist
        return json.dumps({"failed": type(error).__name__, "shown": shown})
    return json.dumps({"answer": result.final_output, "shown": shown})
