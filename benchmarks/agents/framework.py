"""The calculator as an agent of openai-agents. It does not know of training."""

import json
import operator
import random
from dataclasses import dataclass, field

from agents import (
    Agent,
    AgentsException,
    OpenAIChatCompletionsModel,
    RunContextWrapper,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
CLIENT = AsyncOpenAI(base_url="http://unset", api_key="unset")


@dataclass
class Display:
    """The display of one rollout."""

    offset: int
    shown: list[str] = field(default_factory=list)


def tool(name: str):
    def calculate(context: RunContextWrapper[Display], a: int, b: int) -> str:
        display = context.context
        display.shown.append(str(10 + (getattr(operator, name)(a, b) + display.offset) % 90))
        return display.shown[-1]

    return function_tool(calculate, name_override=name)


TOOLS = [tool(name) for name in ("add", "sub", "mul")]


async def play(question: str, base_url: str, api_key: str) -> str:
    display = Display(random.randrange(90))
    model = OpenAIChatCompletionsModel("policy", CLIENT.with_options(base_url=base_url, api_key=api_key))
    agent = Agent(name="calculator", model=model, tools=TOOLS)
    try:
        result = await Runner.run(agent, question, max_turns=4, context=display)
    except AgentsException as error:  # such as a call of a tool that does not exist
        return json.dumps({"failed": type(error).__name__, "shown": display.shown})
    return json.dumps({"answer": result.final_output, "shown": display.shown})
