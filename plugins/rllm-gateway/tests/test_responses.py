"""Tests OpenAI's Responses with the SDK: what it reads, what it sends back, and which conversation a call goes on."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from conftest import Client, Policy, check_exact, read_by, rollout, said
from openai import AsyncOpenAI, BadRequestError, InternalServerError
from openai.types.responses import Response
from rllm_gateway.dialects import responses
from rllm_gateway.errors import BadRequest

from rllm_core.algorithms.samples import segments
from rllm_core.engine import EngineError
from rllm_core.types import Step

read = functools.partial(read_by, responses)
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "add",
        "description": "Adds.",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    }
]
CALLS = (("add", {"a": 1, "b": 2}), ("add", {"b": 4, "a": 3}))
USER: dict[str, Any] = {"role": "user", "content": "what is 1+2, and 3+4?"}
MORE: dict[str, Any] = {"role": "user", "content": [{"type": "input_text", "text": "more"}]}
PIXEL = "data:image/png;base64,AAAA"


def calling(prompt: str, seed: int) -> str:
    """Calls two tools at once, then answers."""
    return said("done é", "so") if "result" in prompt else said("let me see ", "hm", *CALLS)


def answering(text: str) -> Callable[[str, int], str]:
    """Always answers the same."""
    return lambda prompt, seed: text


@asynccontextmanager
async def agent(answer: Callable[[str, int], Any], **options: Any) -> AsyncIterator[tuple[Policy, Client, AsyncOpenAI]]:
    """Opens a rollout and a client of the SDK."""
    policy = Policy(answer)
    async with rollout(policy, **options) as client:
        endpoint = client.endpoint
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as sdk:
            yield policy, client, sdk


def results(response: Response) -> list[Any]:
    """Results of all calls."""
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"result {at}"}
        for at, item in enumerate(response.output)
        if item.type == "function_call"
    ]


def steps_of(client: Client) -> list[Step]:
    """Steps of the only trajectory."""
    [trajectory] = client.endpoint.trajectories()
    return trajectory.steps


async def test_an_answer_has_an_item_for_each_thing_that_was_said() -> None:
    async with agent(calling) as (_, client, sdk):
        response = await sdk.responses.create(
            model="m",
            instructions="be brief",
            input="what is 1+2?",
            tools=TOOLS,
            max_output_tokens=1000,
            store=False,
            include=["reasoning.encrypted_content"],
            parallel_tool_calls=True,
            truncation="auto",
            metadata={"a": "b"},
        )
        Response.model_validate(response.model_dump(), strict=True)
        [step] = steps_of(client)
        assert [(one["role"], one["content"]) for one in step.messages] == [
            ("system", "be brief"),
            ("user", "what is 1+2?"),
        ]
        assert (response.id, response.status) == (f"resp_{step.step_id}", "completed")
        assert response.output_text == "let me see "
        reasoning, message, *calls = response.output
        assert (reasoning.type, message.type) == ("reasoning", "message")
        assert [part.text for part in reasoning.content] == ["hm"]
        assert [(call.name, call.call_id, call.arguments) for call in calls] == [
            (call["function"]["name"], call["id"], call["function"]["arguments"])
            for call in step.response["tool_calls"]
        ]
        assert len({item.id for item in response.output}) == 4
        assert (response.usage.input_tokens, response.usage.output_tokens) == (
            len(step.prompt_ids),
            len(step.completion_ids),
        )
        assert response.usage.total_tokens == len(step.prompt_ids) + len(step.completion_ids)
        assert response.tools[0].name == "add"


async def test_a_streamed_answer_equals_the_whole_one() -> None:
    async with agent(calling) as (_, client, sdk):
        asked: dict[str, Any] = {"model": "m", "input": [USER], "tools": TOOLS}
        whole = await sdk.responses.create(**asked)
        async with sdk.responses.stream(**asked) as stream:
            heard = [event async for event in stream]
            final = await stream.get_final_response()
        assert [event.sequence_number for event in heard] == list(range(len(heard)))
        assert heard[-1].type == "response.completed"
        assert sum(event.type == "response.output_item.done" for event in heard) == 4

        one, other = (without_ids(response, client) for response in (whole, final))
        assert one == other
        pieces = [event.delta for event in heard if event.type.endswith(".delta")]
        reasoning, message, *calls = whole.output
        assert pieces == [reasoning.content[0].text, message.content[0].text, *(call.arguments for call in calls)]


def without_ids(response: Response, client: Client) -> Any:
    """Returns a response without what differs between equal answers."""
    found = response.model_dump(exclude={"created_at", "completed_at"}, exclude_none=True, warnings=False)
    step = client.endpoint.forest[response.id.removeprefix("resp_")].step
    names = {step.step_id: "ID", **{call["id"]: f"call {at}" for at, call in enumerate(step.response["tool_calls"])}}

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(one) for key, one in value.items() if key not in ("parsed", "parsed_arguments")}
        if isinstance(value, list):
            return [renamed(one) for one in value]
        for name, new in names.items():
            value = value.replace(name, new) if isinstance(value, str) else value
        return value

    return renamed(found)


async def test_pieces_of_a_stream_add_up_to_its_items() -> None:
    """Some clients build the answer from the pieces, and never look at the last event."""
    async with agent(calling) as (_, _client, sdk):
        built: dict[int, Any] = {}
        async for event in await sdk.responses.create(model="m", input=[USER], tools=TOOLS, stream=True):
            if event.type == "response.output_item.added":
                assert event.output_index == len(built)
                built[event.output_index] = event.item.to_dict()
            elif event.type == "response.content_part.added":
                built[event.output_index]["content"].append(event.part.to_dict())
            elif event.type in ("response.output_text.delta", "response.reasoning_text.delta"):
                built[event.output_index]["content"][event.content_index]["text"] += event.delta
            elif event.type == "response.function_call_arguments.delta":
                built[event.output_index]["arguments"] += event.delta
            elif event.type == "response.output_item.done":
                assert event.item.to_dict() == built[event.output_index] | {"status": "completed"}
        assert event.type == "response.completed"
        assert [item.to_dict() for item in event.response.output] == [
            item | {"status": "completed"} for item in built.values()
        ]


async def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    async with agent(answering("a long answer")) as (_, _client, sdk):
        asked: dict[str, Any] = {"model": "m", "input": "hi", "max_output_tokens": 6}
        whole = await sdk.responses.create(**asked)
        [message] = whole.output
        assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (whole.output_text, message.status, whole.max_output_tokens) == ("a long", "incomplete", 6)
        heard = [event async for event in await sdk.responses.create(**asked, stream=True)]
        assert heard[-1].type == "response.incomplete"
        assert heard[-1].response.output_text == "a long"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
async def test_turns_with_tools_are_one_sequence(by_id: bool, is_streamed: bool) -> None:
    async with agent(calling) as (policy, client, sdk):
        history: list[Any] = [USER]
        last: Response | None = None
        for turn in range(3):
            asked: dict[str, Any] = {"model": "m", "input": history, "instructions": "be brief", "tools": TOOLS}
            if by_id and last is not None:
                asked |= {"previous_response_id": last.id, "input": results(last) or [MORE]}
            if is_streamed:
                async with sdk.responses.stream(**asked) as stream:
                    last = await stream.get_final_response()
            else:
                last = await sdk.responses.create(**asked)
            assert last.previous_response_id == asked.get("previous_response_id")
            history += [item.to_dict() for item in last.output]
            history += results(last) if turn == 0 else [MORE]
        steps = steps_of(client)
        assert segments(steps) == [[0, 1, 2]]
        assert [step.break_reason for step in steps] == [None] * 3
        roles = ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
        assert [one["role"] for one in steps[2].messages] == roles
        own = [call["id"] for call in steps[0].response["tool_calls"]]
        assert [one["tool_call_id"] for one in steps[2].messages if one["role"] == "tool"] == own
        assert steps[2].messages[-1]["content"] == "more"
        assert client.endpoint.metrics()["gateway_rewritten_answers"] == 0
        check_exact(policy, client.endpoint)


@pytest.mark.parametrize("texts", [("", None), ("", "only thoughts"), ("text", None), ("text", "thoughts")])
async def test_every_answer_survives_in_a_history_of_items(texts: tuple[str, str | None]) -> None:
    async with agent(answering(said(*texts))) as (_, client, sdk):
        history: list[Any] = [USER]
        for _ in range(3):
            response = await sdk.responses.create(model="m", input=history)
            history += [*(item.to_dict() for item in response.output), MORE]
        assert segments(steps_of(client)) == [[0, 1, 2]]


async def test_any_answer_can_be_gone_on_from_by_its_id() -> None:
    async with agent(lambda prompt, seed: f"answer {seed % 10_000}") as (policy, client, sdk):
        first = await sdk.responses.create(model="m", input="hi")
        for text in ("left", "right"):
            await sdk.responses.create(model="m", input=text, previous_response_id=first.id)
        assert client.endpoint.metrics()["gateway_roots"] == 1
        assert segments(steps_of(client)) == [[0, 1], [2]]
        with pytest.raises(BadRequestError, match="no answer"):
            await sdk.responses.create(model="m", input="hi", previous_response_id="resp_other")
        check_exact(policy, client.endpoint)


async def test_an_id_tells_equal_answers_apart() -> None:
    async with agent(answering(said("ok"))) as (_, client, sdk):
        first, second = [await sdk.responses.create(model="m", input="hi") for _ in range(2)]
        for _ in range(2):
            await sdk.responses.create(model="m", input="on", previous_response_id=second.id)
        [one, other] = client.endpoint.forest.roots
        assert [f"resp_{root.id}" for root in (one, other)] == [first.id, second.id]
        assert [len(root.after) for root in (one, other)] == [0, 2]


@pytest.mark.parametrize(
    ("second", "roots"), [({"instructions": "be brief"}, 1), ({}, 1), ({"instructions": "be long"}, 2)]
)
async def test_other_instructions_begin_another_conversation(second: dict[str, str], roots: int) -> None:
    async with agent(answering("yes")) as (_, client, sdk):
        first = await sdk.responses.create(model="m", input="hi", instructions="be brief")
        await sdk.responses.create(model="m", input="on", previous_response_id=first.id, **second)
        *_, last = steps_of(client)
        assert client.endpoint.metrics()["gateway_roots"] == roots
        assert [(one["role"], one["content"]) for one in last.messages] == [
            ("system", second.get("instructions", "be brief")),
            *[("user", "hi"), ("assistant", "yes"), ("user", "on")],
        ]


def test_items_of_one_answer_become_one_message() -> None:
    def thought(*texts: str, key: str = "content") -> Any:
        return {"type": "reasoning", "id": "x", "summary": [], key: [{"text": text} for text in texts]}

    def call(name: str) -> Any:
        return {"type": "function_call", "call_id": f"id_{name}", "name": name, "arguments": "{}"}

    def called(*names: str) -> Any:
        return [
            {"id": f"id_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names
        ]

    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "said"}]}
    image = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": PIXEL, "detail": "auto"}]
    given = [
        {"role": "developer", "content": "rule"},
        {"type": "message", "role": "user", "content": image},
        *[thought("a", "b"), thought("c", key="summary"), text, call("f"), call("g")],
        {"type": "function_call_output", "call_id": "id_f", "output": "1"},
        {"type": "function_call_output", "call_id": "id_g", "output": [{"type": "input_text", "text": "2"}]},
        *[call("h"), text],
        *[text, thought("d"), call("i")],
        *[thought("e")],
        {"role": "user", "content": "end"},
    ]
    assert read({"input": given, "instructions": "first"}).history.since(0) == [
        {"role": "system", "content": "first"},
        {"role": "system", "content": "rule"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": PIXEL}}],
        },
        {"role": "assistant", "content": "said", "reasoning_content": "a\nb\nc", "tool_calls": called("f", "g")},
        {"role": "tool", "content": "1", "tool_call_id": "id_f"},
        {"role": "tool", "content": "2", "tool_call_id": "id_g"},
        {"role": "assistant", "content": "said", "tool_calls": called("h")},
        {"role": "assistant", "content": "said"},
        {"role": "assistant", "content": "", "reasoning_content": "d", "tool_calls": called("i")},
        {"role": "assistant", "content": "", "reasoning_content": "e"},
        {"role": "user", "content": "end"},
    ]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": []}, "input must be text or a list"),
    "a reference": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference is not supported"),
    "an item of a hosted tool": ({"input": [{"type": "web_search_call", "id": "w"}]}, "'web_search_call'"),
    "a file": ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "'input_file' is not supported"),
    "an address": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://a.b/c.png"}]}]},
        "data: URL",
    ),
    "a hosted tool": ({"tools": [{"type": "web_search"}]}, "must execute its tools itself"),
    "a tool of chat completions": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "needs a name"),
    "a schema": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}},
        "text.format = json_schema cannot be honored",
    ),
    "a forced call": ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice = required cannot be honored"),
    "a stored conversation": ({"conversation": "conv_1"}, "conversation is not supported"),
    "background": ({"background": True}, "background is not supported"),
    "no length": ({"max_output_tokens": 0}, "max_output_tokens must be a positive integer"),
}


@pytest.mark.parametrize(("fields", "message"), WRONG.values(), ids=WRONG)
async def test_what_cannot_be_done_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    async with agent(calling) as (policy, _, sdk):
        with pytest.raises(BadRequestError) as refused:
            await sdk.responses.create(**{"model": "m", "input": "hi", **fields})
        assert refused.value.type == "invalid_request_error"
        assert message in refused.value.body["message"]
        assert "\n" not in refused.value.body["message"]
        assert not policy.asked


@pytest.mark.parametrize(
    "body",
    [
        {"input": [3]},
        {"input": [{"type": ["message"]}]},
        {"input": [{"type": "function_call", "call_id": "x"}]},
        {"input": [{"type": "function_call_output", "output": {"a": 1}}]},
        {"input": [{"type": "reasoning", "summary": 3}]},
        {"input": [{"role": "user", "content": [3]}]},
        {"input": {"role": "user"}},
        {"input": "hi", "tools": 3},
        {"input": "hi", "tools": [3]},
        {"input": "hi", "model": 3},
        {"input": "hi", "instructions": ["be brief"]},
        {"input": "hi", "previous_response_id": 3},
        {},
    ],
)
def test_malformed_requests_are_refused(body: Any) -> None:
    with pytest.raises(BadRequest):
        read(body)


async def test_the_run_file_can_say_that_fields_are_ignored() -> None:
    async with agent(calling, unsupported_fields="ignore") as (_, client, sdk):
        await sdk.responses.create(
            model="m",
            input="hi",
            temperature=0.1,
            top_p=0.5,
            reasoning={"effort": "high"},
            text={"format": {"type": "json_object"}},
            tools=[{"type": "web_search"}, *TOOLS, {"type": "namespace", "name": "n", "tools": TOOLS}],
            tool_choice="required",
        )
        counts = client.endpoint.metrics()
        assert counts["gateway_ignored_tools"] == 2
        ignored = {"temperature", "top_p", "reasoning", "text.format", "tool_choice", "tools"}
        assert {name for name in counts if "ignored" in name} == {f"gateway_ignored_{name}" for name in ignored}


async def test_an_engine_that_fails_is_an_error_of_the_server() -> None:
    async with agent(lambda prompt, seed: EngineError("boom")) as (_, client, sdk):
        with pytest.raises(InternalServerError, match="boom"):
            await sdk.responses.create(model="m", input="hi", stream=True)
        assert isinstance(client.endpoint.failure, EngineError)
        client.endpoint.failure = None  # else leaving raises it
