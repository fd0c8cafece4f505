"""Mistakes that other gateways have made with the calls of agents, and that the other tests do not show.

Names in brackets are repositories and their issues.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anthropic
import openai
import pytest
from arithmetic import SCHEMAS
from playing import check_exact, opened, parser
from rllm_gateway import Endpoint

from rllm_core.algorithms.samples import segments
from rllm_core.types import Step

USER = {"role": "user", "content": "what is 3+4?"}
MORE = {"role": "user", "content": "more"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"b":4 ,  "a": 3}}\n</tool_call>'
TEXT_AND_CALLS = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "mul", "arguments": {{}}}}\n</tool_call>'
ADDED, MULTIPLIED = ("add", {"a": 3, "b": 4}), ("mul", {})


def steps_of(endpoint: Endpoint) -> list[Step]:
    """All steps, in the order of training."""
    return [step for trajectory in endpoint.trajectories() for step in trajectory.steps]


def prompt_of(step: Step) -> str:
    """Text of a prompt."""
    return parser().decode(step.prompt_ids.tolist())


async def ask(endpoint: Endpoint, messages: Sequence[Any], **body: Any) -> Any:
    """Asks with OpenAI's SDK."""
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="x") as client:
        completion = await client.chat.completions.create(**{"model": "policy", "messages": messages, **body})
    return completion.choices[0].message


async def test_subagents_that_take_turns_are_not_broken_into_steps() -> None:
    """[rllm-org/rllm#774, verl-project/verl#6299] One session for all of them made a sequence of every step."""
    async with opened(*map(str, range(9))) as (endpoint, engine):
        agents = [[{"role": "system", "content": name}, USER] for name in ("planner", "reader", "writer")]
        for _ in range(3):
            for messages in agents:
                messages += [await ask(endpoint, messages), MORE]
        [trajectory] = endpoint.trajectories()
        assert segments(trajectory.steps) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
        assert [step.text for step in trajectory.steps] == ["0", "3", "6", "1", "4", "7", "2", "5", "8"]
        check_exact(trajectory.steps, engine)


async def chat(endpoint: Endpoint) -> tuple[str, list[Any]]:
    """The answer over chat completions."""
    message = await ask(endpoint, [USER], tools=SCHEMAS)
    return message.content, [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls]


async def chat_streamed(endpoint: Endpoint) -> tuple[str, list[Any]]:
    """The answer over streamed chat completions, put together as frameworks do."""
    text, calls = "", {}
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="x") as client:
        asked: dict[str, Any] = {"model": "policy", "messages": [USER], "tools": SCHEMAS}
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for one in choice.delta.tool_calls or ():
                    call = calls.setdefault(one.index, ["", ""])
                    call[0] += one.function.name or ""
                    call[1] += one.function.arguments or ""
    return text, [(name, json.loads(arguments)) for name, arguments in calls.values()]


async def responses(endpoint: Endpoint) -> tuple[str, list[Any]]:
    """The answer over Responses."""
    tools: Any = [{"type": "function", **one["function"]} for one in SCHEMAS]  # type: ignore[dict-item]
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="x") as client:
        response = await client.responses.create(model="policy", input="what is 3+4?", tools=tools)
    calls = [(one.name, json.loads(one.arguments)) for one in response.output if one.type == "function_call"]
    return response.output_text, calls


async def messages(endpoint: Endpoint) -> tuple[str, list[Any]]:
    """The answer over Messages."""
    tools: Any = [{"name": one["function"]["name"], "input_schema": {"type": "object"}} for one in SCHEMAS]  # type: ignore[index]
    async with anthropic.AsyncAnthropic(base_url=endpoint.anthropic_base_url, api_key="x") as client:
        message = await client.messages.create(model="policy", max_tokens=900, messages=[USER], tools=tools)  # type: ignore[list-item]
    text = "".join(block.text for block in message.content if block.type == "text")
    return text, [(block.name, block.input) for block in message.content if block.type == "tool_use"]


@pytest.mark.parametrize("asked", [chat, chat_streamed, responses, messages])
async def test_text_beside_calls_and_all_calls_arrive(asked: Any) -> None:
    """[awslabs/agentcore-rl-toolkit#109] Text next to calls was dropped, and all calls but the first."""
    async with opened(TEXT_AND_CALLS) as (endpoint, engine):
        text, calls = await asked(endpoint)
        assert (text.strip(), calls) == ("Let me see.", [ADDED, MULTIPLIED])
        check_exact(steps_of(endpoint), engine)


async def test_ids_of_calls_differ_after_a_compaction() -> None:
    """[sst/opencode#40235] A second conversation began to count anew, and its results went to the first one's calls."""
    async with opened(CALL, CALL, "done") as (endpoint, engine):
        first = await ask(endpoint, [USER], tools=SCHEMAS)
        summary = {"role": "user", "content": "so far: nothing"}
        second = await ask(endpoint, [summary], tools=SCHEMAS)
        ids = [message.tool_calls[0].id for message in (first, second)]
        assert len(set(ids)) == 2
        results = [{"role": "tool", "tool_call_id": one, "content": f"result {at}"} for at, one in enumerate(ids)]
        await ask(endpoint, [USER, first, results[0], summary, second, results[1]], tools=SCHEMAS)
        steps = steps_of(endpoint)
        [last] = [step for step in steps if step.text == "done"]
        assert [one["tool_call_id"] for one in last.messages if one["role"] == "tool"] == ids
        assert len(segments(steps)) == 3
        check_exact(steps, engine)


async def test_a_replaced_answer_stays_replaced() -> None:
    """[rllm-org/rllm, token_accumulator.py] The newest answer was never compared, so the sampled one came back."""
    async with opened("I lie", "done") as (endpoint, engine):
        await ask(endpoint, [USER])
        await ask(endpoint, [USER, {"role": "assistant", "content": "I do not"}, MORE])
        steps = steps_of(endpoint)
        assert "I do not" in prompt_of(steps[1])
        assert "I lie" not in prompt_of(steps[1])
        assert segments(steps) == [[0], [1]]
        check_exact(steps, engine)


@pytest.mark.parametrize("where", ["before", "after"])
async def test_what_the_policy_did_not_say_is_shown_and_never_trained(where: str) -> None:
    """[rllm-org/rllm, token_accumulator.py] Answers of others vanished from the prompt."""
    other = [{"role": "user", "content": "example"}, {"role": "assistant", "content": "not sampled"}]
    async with opened("one", "two") as (endpoint, engine):
        start: list[Any] = [*other, USER] if where == "before" else [USER]
        first = await ask(endpoint, start)
        await ask(endpoint, [*start, first, *(other if where == "after" else []), MORE])
        steps = steps_of(endpoint)
        assert "not sampled" in prompt_of(steps[1])
        assert [step.text for step in steps] == ["one", "two"]
        assert len(segments(steps)) == (1 if where == "before" else 2)
        check_exact(steps, engine)
