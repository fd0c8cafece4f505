"""Tests Anthropic's Messages with its own SDK, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import msgspec
import pytest
from conftest import Policy, check_exact, read_by, said
from rllm_gateway import Endpoint, Gateway
from rllm_gateway.bodies import Bodies
from rllm_gateway.dialects import anthropic as dialect
from rllm_gateway.errors import BadRequest

from rllm_core.algorithms.samples import segments
from rllm_core.engine import EngineBusy, EngineError, Terminated, TITOCompleter

Ask = Callable[..., Any]

USER = {"role": "user", "content": "what is 1+2, and 3+4?"}
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}]
CALLS = (("add", {"a": 1, "b": 2}), ("add", {"b": 4, "a": 3, "unit": "€"}))
THINK = {"type": "enabled", "budget_tokens": 1024}
PIXEL = "iVBORw0KGgo="


def calling(prompt: str, seed: int) -> str:
    """Calls two tools at once, then one, then answers."""
    if "result 2" in prompt:
        return said("three and seven, é", "all there")
    if "result 1" in prompt:
        return said("", None, ("add", {"a": 3, "b": 7}))
    return said("let me see ", "two sums", *CALLS)


def results(message: Any, start: int) -> dict[str, Any]:
    """Results of all calls of an answer, as blocks of one message, and what the user adds."""
    calls = [block for block in message.content if block.type == "tool_use"]
    found: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": f"result {at}"}]}
        for at, call in enumerate(calls, start)
    ]
    found[-1]["cache_control"] = {"type": "ephemeral"}
    return {"role": "user", "content": [*found, {"type": "text", "text": "go on"}]}


@asynccontextmanager
async def agent(policy: Policy, *, ignores: bool = False, **options: Any) -> AsyncIterator[tuple[Endpoint, Ask]]:
    """Opens a gateway and the SDK's client of one rollout, and gives a function that asks."""
    served = Gateway(unsupported_fields="ignore" if ignores else "refuse")
    await served.open()
    try:
        async with (
            served.rollout(TITOCompleter(policy, seed=3, **options)) as endpoint,
            anthropic.AsyncAnthropic(base_url=endpoint.anthropic_base_url, api_key="any") as client,
        ):

            async def ask(messages: Any, *, streams: bool = False, **more: Any) -> Any:
                body = {"model": "m", "max_tokens": 900, "messages": messages} | more
                if not streams:
                    return await client.messages.create(**body)
                async with client.messages.stream(**body) as stream:
                    return await stream.get_final_message()

            yield endpoint, ask
    finally:
        await served.close()


async def played(ask: Ask, **more: Any) -> list[Any]:
    """Plays three turns with tools and returns the answers."""
    messages: list[Any] = [USER]
    answers = []
    for start in (0, 2, None):
        answers.append(await ask(messages, tools=TOOLS, system="be brief", **more))
        messages.append({"role": "assistant", "content": answers[-1].content})
        if start is not None:
            messages.append(results(answers[-1], start))
    return answers


@pytest.mark.parametrize("thinking", [None, THINK, {"type": "adaptive"}, {"type": "disabled"}])
@pytest.mark.parametrize("streams", [False, True])
async def test_three_turns_with_parallel_tools_are_one_segment(streams: bool, thinking: Any) -> None:
    policy = Policy(calling)
    async with agent(policy) as (endpoint, ask):
        answers = await played(ask, streams=streams, **({"thinking": thinking} if thinking else {}))
    shows = thinking is not None and thinking["type"] != "disabled"
    assert [[block.type for block in answer.content] for answer in answers] == [
        [*["thinking"] * shows, "text", "tool_use", "tool_use"],
        ["tool_use"],
        [*["thinking"] * shows, "text"],
    ]
    assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use", "end_turn"]
    assert [block.input for block in answers[0].content[-2:]] == [arguments for _, arguments in CALLS]
    assert answers[2].content[-1].text == "three and seven, é"
    if shows:
        assert answers[0].content[0].thinking == "two sums"
        assert answers[0].content[0].signature
    [trajectory] = endpoint.trajectories()
    assert segments(trajectory.steps) == [[0, 1, 2]]
    assert [len(step.prompt_ids) for step in trajectory.steps] == [answer.usage.input_tokens for answer in answers]
    assert [len(step.completion_ids) for step in trajectory.steps] == [answer.usage.output_tokens for answer in answers]
    roles = [message["role"] for message in trajectory.steps[1].messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "user"]
    check_exact(policy, endpoint)


async def test_the_tool_runner_of_the_sdk_is_one_segment() -> None:
    """It asks for a thread first, of which it would send new messages only."""
    policy = Policy(calling)

    @anthropic.beta_async_tool
    async def add(a: int, b: int, unit: str = "") -> str:
        """Adds."""
        return "result 2" if b == 7 else "result 1"

    async with (
        agent(policy) as (endpoint, _),
        anthropic.AsyncAnthropic(base_url=endpoint.anthropic_base_url, api_key="any") as client,
    ):
        runner = client.beta.messages.tool_runner(model="m", max_tokens=900, messages=[USER], tools=[add])
        answers = [answer async for answer in runner]
        with pytest.raises(anthropic.BadRequestError, match="thread is not supported"):
            await client.beta.messages.create(model="m", max_tokens=9, messages=[USER], thread={"type": "create"})
    assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use", "end_turn"]
    [trajectory] = endpoint.trajectories()
    assert segments(trajectory.steps) == [[0, 1, 2]]


async def test_a_streamed_answer_is_the_whole_one() -> None:
    found = []
    for streams in (False, True):
        # Equal seeds give equal ids of tool calls; those of messages are random.
        async with agent(Policy(calling)) as (_, ask):
            answers = await played(ask, streams=streams, thinking=THINK)
        kept = ("content", "model", "role", "stop_reason", "stop_sequence", "type", "usage")
        found.append([{key: value for key, value in one.to_dict().items() if key in kept} for one in answers])
        assert all(one.id.startswith("msg_") for one in answers)
    assert found[0] == found[1]
    assert found[0][0]["usage"]["cache_read_input_tokens"] == 0


async def test_events_have_the_names_and_order_of_the_interface() -> None:
    async with (
        agent(Policy(calling)) as (endpoint, _),
        anthropic.AsyncAnthropic(base_url=endpoint.anthropic_base_url, api_key="any") as client,
    ):
        stream = await client.messages.create(
            model="m", max_tokens=900, messages=[USER], tools=TOOLS, thinking=THINK, stream=True
        )
        events = [event async for event in stream]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thinking = [*block[:2], *block[1:]]
    assert [event.type for event in events] == [
        *("message_start", *thinking, *block, *block, *block),
        *("message_delta", "message_stop"),
    ]
    assert events[0].message.content == []
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta", "input_json_delta"]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stop_sequence_is_named_and_cut_off(streams: bool) -> None:
    policy = Policy(lambda prompt, seed: "one two three")
    async with agent(policy) as (endpoint, ask):
        first = await ask([USER], stop_sequences=["three", "tw"], streams=streams)
        shown = {"role": "assistant", "content": first.content}
        second = await ask([USER, shown, USER], stop_sequences=["four"], streams=streams)
    assert (first.content[0].text, first.stop_reason, first.stop_sequence) == ("one ", "stop_sequence", "tw")
    assert (second.content[0].text, second.stop_reason, second.stop_sequence) == ("one two three", "end_turn", None)
    [trajectory] = endpoint.trajectories()
    assert [step.text for step in trajectory.steps] == ["one tw", "one two three"]
    assert segments(trajectory.steps) == [[0, 1]]


async def test_a_stop_sequence_in_the_reasoning_is_named() -> None:
    policy = Policy(lambda prompt, seed: "<think>one two three")
    async with agent(policy) as (_, ask):
        answer = await ask([USER], stop_sequences=["two", "never"], thinking=THINK)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "two")


async def test_an_answer_that_is_cut_off_says_so() -> None:
    async with agent(Policy(lambda prompt, seed: "one two three")) as (_, ask):
        answer = await ask([USER], max_tokens=5, metadata={"user_id": "x"})
    assert (answer.content[0].text, answer.stop_reason, answer.usage.output_tokens) == ("one t", "max_tokens", 5)


async def test_what_the_run_decides_is_counted() -> None:
    async with agent(Policy(calling), ignores=True) as (endpoint, ask):
        of_old_clients = {"temperature": 0.1, "top_k": 3, "betas": ["x"]}
        tools = [SEARCH, *TOOLS]
        await ask([USER], tools=tools, tool_choice={"type": "any"}, service_tier="auto", extra_body=of_old_clients)
    assert {name: value for name, value in endpoint.metrics().items() if "ignored" in name} == {
        "gateway_ignored_temperature": 1.0,
        "gateway_ignored_tool_choice": 1.0,
        "gateway_ignored_tools": 1.0,
        "gateway_ignored_top_k": 1.0,
    }


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
REMOTE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
REFUSED = {
    "remote image": ({"messages": [{"role": "user", "content": [REMOTE]}]}, "base64"),
    "document": ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
    "tools": ({"tools": TOOLS[0]}, "tools must be a list"),
    "server tool": ({"tools": [SEARCH]}, "web_search_20250305"),
    "tool choice": ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
    "one call": ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "disable_parallel_tool_use"),
    "format": ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
    "prefill": ({"messages": [USER, {"role": "assistant", "content": "It is"}]}, "last message"),
    "role": ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    "no messages": ({"messages": []}, "messages must not be empty"),
    "content": ({"messages": [{"role": "user", "content": 3}]}, "list of blocks"),
    "image of the system": ({"system": [IMAGE]}, "use text"),
    "stop sequences": ({"stop_sequences": [""]}, "stop_sequences"),
    "maximum": ({"max_tokens": 0}, "max_tokens"),
    "thinking": ({"thinking": "yes"}, "thinking must be an object"),
    "servers": ({"extra_body": {"mcp_servers": [{"url": "http://x"}]}}, "mcp_servers"),
}


@pytest.mark.parametrize(("body", "message"), REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_honored_is_refused(body: Any, message: str) -> None:
    async with agent(Policy(calling)) as (endpoint, ask):
        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(**({"messages": [USER]} | body))
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert message in caught.value.body["error"]["message"]
    assert "\n" not in caught.value.body["error"]["message"]
    assert endpoint.trajectories() == []


async def test_a_prompt_that_is_too_long_is_recognized() -> None:
    async def stubborn() -> None:
        async with agent(Policy(calling), max_prompt_tokens=9) as (_, ask):
            with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long.* at most 9 "):
                await ask([USER])

    with pytest.raises(Terminated):
        await stubborn()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("failure", "kind", "name"),
    [
        (EngineBusy("full"), anthropic.InternalServerError, "overloaded_error"),
        (EngineError("broken"), anthropic.InternalServerError, "api_error"),
    ],
)
async def test_a_failed_engine_is_an_error_that_no_client_repeats(
    failure: Exception, kind: Any, name: str, streams: bool
) -> None:
    asked = []

    def failing(prompt: str, seed: int) -> Exception:
        asked.append(seed)
        return failure

    async def careless() -> None:
        async with agent(Policy(failing)) as (_, ask):
            with pytest.raises(kind) as caught:
                await ask([USER], streams=streams)
            assert caught.value.body["error"]["type"] == name

    with pytest.raises(type(failure)):
        await careless()
    assert len(asked) == 1


async def test_an_unknown_rollout_and_an_ended_one_are_refused() -> None:
    async with agent(Policy(calling)) as (endpoint, ask):
        other = endpoint.anthropic_base_url.replace(endpoint.api_key, "other")
        async with anthropic.AsyncAnthropic(base_url=other, api_key="any") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="m", max_tokens=9, messages=[USER])
        endpoint._is_open = False
        with pytest.raises(anthropic.PermissionDeniedError) as caught:
            await ask([USER])
        endpoint._is_open = True
    assert caught.value.body["error"]["type"] == "permission_error"


async def test_arguments_that_are_no_json_object_are_kept_and_recognized() -> None:
    nan = float("nan")

    def odd(prompt: str, seed: int) -> str:
        return said("done") if "result" in prompt else said("", None, ("add", {"a": nan}), ("add", {"a": 10**30}))

    async with agent(Policy(odd)) as (endpoint, ask):
        first = await ask([USER], tools=TOOLS)
        shown = {"role": "assistant", "content": first.content}
        await ask([USER, shown, results(first, 0)], tools=TOOLS)
    assert [block.input for block in first.content] == [{dialect.UNPARSED: '{"a": NaN}'}, {"a": 10**30}]
    [trajectory] = endpoint.trajectories()
    assert segments(trajectory.steps) == [[0, 1]]


async def test_an_empty_answer_has_a_block() -> None:
    async with agent(Policy(lambda prompt, seed: said("", "hm"))) as (_, ask):
        assert [block.to_dict() for block in (await ask([USER])).content] == [{"type": "text", "text": ""}]


def test_every_message_is_read() -> None:
    said_before = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "secret"},
        {"type": "text", "text": "see"},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é"}},
        {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
    ]
    answered = [
        {"type": "text", "text": "well"},
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a picture"}, IMAGE]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no such file", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t3"},
    ]
    body = {
        "model": "m",
        "max_tokens": 8,
        "system": [
            {"type": "text", "text": "be ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "good"},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]},
            {"role": "assistant", "content": "one"},
            {"role": "assistant", "content": said_before},
            {"role": "user", "content": answered},
            {"role": "system", "content": "hurry"},
        ],
        "tools": [{"type": "custom", **TOOLS[0], "cache_control": {"type": "ephemeral"}}],
        "thinking": {"type": "disabled"},
    }
    call = read_by(dialect, body)
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    calls = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": arguments}}
        for name, arguments in (("t1", '{"at": "é"}'), ("t2", "{}"))
    ]
    assert call.history.since(0) == [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": [{"type": "text", "text": "look"}, picture]},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "see", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "a picture"}, picture]},
        {"role": "tool", "tool_call_id": "t2", "content": "no such file"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "well"},
        {"role": "system", "content": "hurry"},
    ]
    function = {"name": "add", "description": "Adds.", "parameters": TOOLS[0]["input_schema"]}
    assert call.tools == [{"type": "function", "function": function}]
    assert read_by(dialect, body | {"tool_choice": {"type": "none"}}).tools is None


def test_a_request_of_a_length_needs_no_maximum() -> None:
    body = {"model": "m", "messages": [USER, {"role": "assistant", "content": "It is"}], "tools": TOOLS}
    found = Bodies().read(dialect.FORM, msgspec.json.encode(body))
    call = dialect.read_to_count(found.fields, found.history)
    assert [message["role"] for message in call.history.since(0)] == ["user", "assistant"]
    assert call.tools is not None
    assert dialect.counted(7) == {"input_tokens": 7}
    with pytest.raises(BadRequest, match="max_tokens is required"):
        read_by(dialect, body)


async def test_the_length_of_a_prompt_is_that_which_is_sampled_from() -> None:
    policy = Policy(calling)
    async with (
        agent(policy) as (endpoint, ask),
        anthropic.AsyncAnthropic(base_url=endpoint.anthropic_base_url, api_key="any") as client,
    ):
        messages: list[Any] = [USER]
        for turn in range(2):
            counted = await client.messages.count_tokens(model="m", messages=messages, tools=TOOLS)
            answer = await ask(messages, tools=TOOLS)
            assert counted.input_tokens == answer.usage.input_tokens == len(policy.asked[-1][0])
            messages += [{"role": "assistant", "content": answer.content}, results(answer, turn)]
        assert len(policy.asked) == 2
        assert endpoint.metrics()["gateway_calls"] == 2
