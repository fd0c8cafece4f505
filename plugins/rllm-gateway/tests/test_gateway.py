"""Tests which conversation a call goes on, whose tokens it trains, and what failures become."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from typing import Any

import pytest
from conftest import TOOLS, Client, Policy, check_exact, rollout, said
from rllm_gateway import Gateway

from rllm_core.algorithms.samples import segments
from rllm_core.engine import EngineBusy, EngineError, Terminated, TITOCompleter
from rllm_core.errors import ConfigError
from rllm_core.types import Step

USER = {"role": "user", "content": "what is 1+2, and 3+4?"}
MORE = {"role": "user", "content": "more"}
CALLS = (("add", {"a": 1, "b": 2}), ("add", {"b": 4, "a": 3}))


def echo(prompt: str, seed: int) -> str:
    """An answer that shows its seed."""
    return f"answer {seed % 10_000}"


def calling(prompt: str, seed: int) -> str:
    """Calls two tools at once, then answers."""
    return said("done é", "so") if "result" in prompt else said("let me see ", "hm", *CALLS)


def results(message: Any) -> list[Any]:
    """Results of all calls."""
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {at}"}
        for at, call in enumerate(message["tool_calls"])
    ]


def steps_of(client: Client) -> list[Step]:
    """Steps of the only trajectory."""
    [trajectory] = client.endpoint.trajectories()
    return trajectory.steps


def new_ids(message: Any) -> None:
    for at, call in enumerate(message["tool_calls"]):
        call["id"] = f"mine{at}"


def new_spacing(message: Any) -> None:
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=3)


REWRITES = {
    "as sent": lambda message: None,
    "new ids": new_ids,
    "new spacing": new_spacing,
    "without reasoning": lambda message: message.pop("reasoning_content"),
    "parts": lambda message: message.update(content=[{"type": "text", "text": message["content"]}]),
    "stripped": lambda message: message.update(content=message["content"].strip()),
    "fields of its own": lambda message: message.update(provider_specific_fields={"x": 1}, name="agent", audio=None),
}


@pytest.mark.parametrize("rewrite", REWRITES.values(), ids=REWRITES)
async def test_an_agent_may_rewrite_what_it_was_sent(rewrite: Any) -> None:
    policy = Policy(calling)
    async with rollout(policy) as client:
        messages: list[Any] = [{"role": "developer", "content": "be brief"}, USER]
        first = await client.ask(messages, tools=TOOLS)
        shown = copy.deepcopy(first)
        rewrite(shown)
        messages += [shown, *results(shown)]
        second = await client.ask(messages, tools=TOOLS)
        messages += [second, MORE]
        await client.ask(messages, tools=TOOLS)
        steps = steps_of(client)
        assert segments(steps) == [[0, 1, 2]]
        assert [step.break_reason for step in steps] == [None] * 3
        own = [call["id"] for call in steps[0].response["tool_calls"]]
        assert [one["tool_call_id"] for one in steps[1].messages if one["role"] == "tool"] == own
        in_other_words = rewrite in [REWRITES[name] for name in ("new ids", "new spacing", "stripped")]
        assert client.endpoint.metrics()["gateway_rewritten_answers"] == in_other_words
        check_exact(policy, client.endpoint)


@pytest.mark.parametrize(
    "edit",
    [
        lambda message: message.update(content="other"),
        lambda message: message["tool_calls"].pop(),
        lambda message: message["tool_calls"][0]["function"].update(arguments='{"a": 9, "b": 2}'),
        lambda message: message["tool_calls"][0]["function"].update(name="sub"),
    ],
)
async def test_an_edited_answer_begins_a_conversation_of_its_own(edit: Any) -> None:
    policy = Policy(calling)
    async with rollout(policy) as client:
        first = await client.ask([USER], tools=TOOLS)
        shown = copy.deepcopy(first)
        edit(shown)
        await client.ask([USER, shown, *results(shown)], tools=TOOLS)
        assert segments(steps_of(client)) == [[0], [1]]
        assert client.endpoint.metrics()["gateway_roots"] == 2
        check_exact(policy, client.endpoint)


async def test_other_tools_break_the_sequence_with_a_reason() -> None:
    async with rollout(Policy(echo)) as client:
        first = await client.ask([USER], tools=TOOLS)
        await client.ask([USER, first, MORE])
        assert [step.break_reason for step in steps_of(client)] == [None, "tools_changed"]


async def test_branches_compaction_and_subagents_need_no_case_of_their_own() -> None:
    policy = Policy(echo)
    async with rollout(policy) as client:
        first = await client.ask([USER])
        second = await client.ask([USER, first, MORE])
        left = await client.ask([USER, first, {"role": "user", "content": "left"}])
        await client.ask([USER, first, MORE, second, MORE])
        await client.ask([{"role": "user", "content": f"summary of {second['content']}"}, MORE])
        await client.ask([{"role": "system", "content": "sub-agent"}, USER], model="helper")
        await client.ask([USER, first, {"role": "user", "content": "left"}, left, MORE])
        main, helper = client.endpoint.trajectories()
        assert (main.role, helper.role) == ("m", "helper")
        assert segments(main.steps) == [[0, 1, 2], [3, 4], [5]]
        assert [len(one.steps) for one in client.endpoint.trajectories("conversation")] == [5, 1, 1]
        assert client.endpoint.metrics()["gateway_roots"] == 3
        check_exact(policy, client.endpoint)


async def test_the_client_that_shows_its_ids_goes_on_from_its_own_answer() -> None:
    """Two equal answers of one conversation, from a best-of-n loop."""
    async with rollout(Policy(calling)) as client:
        ways = [await client.ask([USER], tools=TOOLS) for _ in range(2)]
        assert ways[0]["content"] == ways[1]["content"]
        await client.ask([USER, ways[1], *results(ways[1])], tools=TOOLS)
        steps = steps_of(client)
        assert segments(steps) == [[0], [1, 2]]


async def test_a_conversation_goes_on_from_the_answer_of_its_own_model() -> None:
    async with rollout(Policy(lambda prompt, seed: "yes")) as client:
        for model in ("planner", "writer"):
            await client.ask([USER], model=model)
        for model in ("writer", "planner"):
            await client.ask([USER, {"role": "assistant", "content": "yes"}, MORE], model=model)
        for tree in client.endpoint.forest.roots:
            assert [one.model for one in tree.after] == [tree.model]


@pytest.mark.parametrize("swaps", [False, True])
async def test_results_of_parallel_calls_are_shown_in_the_order_of_the_calls(swaps: bool) -> None:
    """Many templates leave out the ids, so only the order tells the model which result is whose."""
    policy = Policy(calling)
    async with rollout(policy) as client:
        messages: list[Any] = [USER, first := await client.ask([USER], tools=TOOLS)]
        found = results(first)
        messages += [*(found[::-1] if swaps else found), MORE]
        messages += [await client.ask(messages, tools=TOOLS), USER]
        await client.ask(messages, tools=TOOLS)
        steps = steps_of(client)
        shown = [one["content"] for one in steps[1].messages if one["role"] in ("tool", "user")]
        assert shown == [USER["content"], "result 0", "result 1", "more"]
        assert segments(steps) == [[0, 1, 2]]
        check_exact(policy, client.endpoint)


async def test_an_image_for_a_model_of_text_is_refused_and_the_agent_may_go_on() -> None:
    refused = ConfigError("a message contains an image, but model 'm' takes text only")
    policy = Policy(lambda prompt, seed: refused if "image_url" in prompt else "yes")
    async with rollout(policy) as client:
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        looks = await client.post({"messages": [{"role": "user", "content": [picture]}]})
        assert (looks.status, json.loads(looks.body)["error"]["message"]) == (400, str(refused))
        await client.ask([USER])
        check_exact(policy, client.endpoint)


@pytest.mark.parametrize("shows", [True, False])
async def test_the_client_that_shows_its_reasoning_goes_on_from_its_own_answer(shows: bool) -> None:
    policy = Policy(lambda prompt, seed: said("yes", f"because {seed}"))
    async with rollout(policy) as client:
        response = await client.post({"messages": [USER], "n": 3})
        response.delivered()
        chosen = json.loads(response.body)["choices"][2]["message"]
        await client.ask([USER, chosen if shows else {"role": "assistant", "content": "yes"}, MORE])
        reasoning = chosen["reasoning_content"].encode()
        assert (reasoning in bytes(token for token in policy.asked[-1][0] if token < 256)) == shows
        check_exact(policy, client.endpoint)


async def test_seeds_depend_on_the_conversation_and_not_on_the_order() -> None:
    async def play(order: int) -> list[str]:
        async def agent(client: Client, name: str) -> list[str]:
            messages: list[Any] = [{"role": "user", "content": name}]
            for _ in range(3):
                await asyncio.sleep(waits.random() / 50)
                messages += [await client.ask(messages), MORE]
            return [one["content"] for one in messages if one["role"] == "assistant"]

        waits = random.Random(order)
        async with rollout(Policy(echo)) as client:
            names = ["a", "b", "b", "c", "b"]
            texts = await asyncio.gather(*(agent(client, name) for name in names))
            return sorted(text for one in texts for text in one)

    first = await play(1)
    assert await play(2) == await play(3) == first
    assert len(set(first)) == 15, "equal calls have different samples"


async def test_seeds_depend_on_the_model_that_is_asked_for() -> None:
    async def play(*models: str) -> dict[str, str]:
        async with rollout(Policy(echo)) as client:
            return {model: (await client.ask([USER], model=model))["content"] for model in models}

    first = await play("solver", "critic")
    assert await play("critic", "solver") == first
    assert len(set(first.values())) == 2


async def test_alternatives_are_branches_of_one_prompt() -> None:
    policy = Policy(echo)
    async with rollout(policy) as client:
        first = await client.ask([USER])
        response = await client.post({"messages": [USER, first, MORE], "n": 3})
        response.delivered()
        texts = [choice["message"]["content"] for choice in json.loads(response.body)["choices"]]
        assert len(set(texts)) == 3
        prompts = {tuple(step.prompt_ids.tolist()) for step in client.endpoint.trajectories()[1].steps}
        assert len(prompts) == 1
        check_exact(policy, client.endpoint)


async def test_a_marked_retry_gets_the_recorded_answer() -> None:
    policy = Policy(echo)
    async with rollout(policy) as client:
        body = {"messages": [USER], "model": "m"}
        first = await client.post(body)
        again = await client.post(body, x_stainless_retry_count="1")
        again.delivered()
        assert json.loads(first.body)["choices"] == json.loads(again.body)["choices"]
        assert len(steps_of(client)) == len(policy.asked) == 1
        assert client.endpoint.metrics()["gateway_retried"] == 1


async def test_an_unmarked_repetition_is_a_sample_of_its_own() -> None:
    async with rollout(Policy(echo)) as client:
        first, second = await client.ask([USER]), await client.ask([USER])
        assert first["content"] != second["content"]
        assert len(steps_of(client)) == 2


async def test_a_retry_of_a_later_call_never_gets_an_earlier_answer() -> None:
    """The second of two equal calls fails on its way; its retry must not get the first one's answer."""
    async with rollout(Policy(echo)) as client:
        body = {"messages": [USER], "model": "m"}
        first = await client.post(body)
        second = asyncio.create_task(client.post(body))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        retried = await client.post(body, x_stainless_retry_count="1")
        texts = [json.loads(one.body)["choices"][0]["message"]["content"] for one in (first, retried)]
        assert texts[0] != texts[1]


async def test_an_answer_that_nobody_got_is_in_no_trajectory() -> None:
    async with rollout(Policy(echo)) as client:
        await client.post({"messages": [USER], "model": "m"})
        assert client.endpoint.trajectories() == []
        gone_on = await client.post({"messages": [MORE], "model": "m"})
        answer = json.loads(gone_on.body)["choices"][0]["message"]
        await client.ask([MORE, answer, USER])
        assert [len(one.steps) for one in client.endpoint.trajectories()] == [2], "who goes on from it has got it"


async def test_stop_texts_end_the_step_and_are_hidden_from_the_client() -> None:
    policy = Policy(lambda prompt, seed: "Thought: x\nObservation: made up")
    async with rollout(policy) as client:
        answer = await client.ask([USER], stop=["Observation:"])
        assert answer["content"] == "Thought: x\n"
        await client.ask([USER, answer, {"role": "user", "content": "Observation: 3"}])
        steps = steps_of(client)
        assert steps[0].text == "Thought: x\nObservation:"
        assert segments(steps) == [[0, 1]]


async def test_limits_of_the_run_hold() -> None:
    policy = Policy(lambda prompt, seed: "x" * 5000)
    async with rollout(policy) as client:
        await client.ask([USER], max_completion_tokens=7)
        await client.ask([USER], max_tokens=100_000)
        assert [len(step.completion_ids) for step in steps_of(client)] == [7, 1024]


@pytest.mark.parametrize(
    ("error", "status"), [(EngineError("lost a GPU"), 500), (EngineBusy("503"), 503), (RuntimeError("a bug"), 500)]
)
async def test_a_failure_stays_a_failure_whatever_the_agent_makes_of_it(error: Exception, status: int) -> None:
    failing = [error]

    async def play() -> None:
        async with rollout(Policy(lambda prompt, seed: failing.pop() if failing else "fine")) as client:
            response = await client.post({"messages": [USER]})
            assert response.status == status
            assert response.headers["x-should-retry"] == "false"
            assert str(error) in json.loads(response.body)["error"]["message"]
            await client.ask([USER])

    with pytest.raises(type(error), match=str(error)):
        await play()


async def test_an_agent_may_shorten_what_was_too_long() -> None:
    gateway = Gateway()
    completer = TITOCompleter(Policy(echo), max_prompt_tokens=60)
    long = {"role": "user", "content": "x" * 100}
    async with gateway.rollout(completer) as endpoint:
        client = Client(gateway, endpoint)
        response = await client.post({"messages": [long]})
        assert response.status == 400
        assert json.loads(response.body)["error"]["code"] == "context_length_exceeded"
        await client.ask([MORE])
    with pytest.raises(Terminated, match="at most 60 are allowed"):
        async with gateway.rollout(completer.fork()) as endpoint:
            await Client(gateway, endpoint).post({"messages": [long]})


async def test_a_rollout_has_a_budget_of_calls() -> None:
    async def play() -> None:
        async with rollout(Policy(echo), max_calls=2) as client:
            for _ in range(2):
                await client.ask([USER])
            assert (await client.post({"messages": [USER]})).status == 403

    with pytest.raises(Terminated, match="has made 2 calls"):
        await play()


async def test_when_a_rollout_ends_its_calls_end_and_its_secret_is_void() -> None:
    policy = Policy(echo)
    gateway = Gateway()
    async with gateway.rollout(TITOCompleter(policy)) as endpoint:
        client = Client(gateway, endpoint)
        policy.hold = asyncio.Event()
        running = asyncio.create_task(client.post({"messages": [USER]}))
        while len(endpoint._running) < 1:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
    assert running.done()
    assert policy.cancelled == 1
    policy.hold.set()
    assert (await client.post({"messages": [USER]})).status == 401
    assert endpoint.trajectories() == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe", "not a JSON object"),
        ({}, "messages must be a list"),
        ({"messages": []}, "must not be empty"),
        ({"messages": ["hi"]}, "a message must be an object"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role 'robot'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be text or a list of parts"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "'input_audio' is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "http://x"}]}]}, "data: URL"),
        ({"messages": [USER], "n": 0}, "n must be a positive integer"),
        ({"messages": [USER], "n": 65}, "between 1 and 64"),
        ({"messages": [USER], "n": "2"}, "n must be a positive integer"),
        ({"messages": [USER], "stop": [""]}, "stop must be"),
        ({"messages": [USER], "max_tokens": -1}, "max_tokens must be a positive integer"),
        ({"messages": [USER], "model": 3}, "model must be text"),
        ({"messages": [USER], "tools": [{"type": "web_search"}]}, "must execute its tools itself"),
        ({"messages": [USER], "tools": 3}, "tools must be a list"),
        ({"messages": [USER], "logit_bias": {"1": 2}}, "logit_bias is not supported"),
        ({"messages": [USER], "functions": [{"name": "add"}]}, "functions is not supported: send them as tools"),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, "cannot be honored"),
        ({"messages": [USER], "tool_choice": "required", "tools": TOOLS}, "cannot be honored"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}]}, "needs a function with a name"),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "tool_calls must be a list"),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "JSON"),
    ],
)
async def test_a_wrong_request_is_the_agents_business(body: Any, said: str) -> None:
    async with rollout(Policy(echo)) as client:
        response = await client.post(body)
        assert response.status == 400
        assert said in json.loads(response.body)["error"]["message"]
        assert client.endpoint.metrics()["gateway_calls"] == 0
        await client.ask([USER])


async def test_what_cannot_be_honored_is_ignored_and_counted_if_the_run_file_says_so() -> None:
    async with rollout(Policy(echo), unsupported_fields="ignore") as client:
        await client.ask([USER], response_format={"type": "json_object"}, temperature=0.2, seed=4)
        metrics = client.endpoint.metrics()
        for name in ("response_format", "temperature", "seed"):
            assert metrics[f"gateway_ignored_{name}"] == 1


async def test_a_wish_for_one_call_at_a_time_is_counted() -> None:
    async with rollout(Policy(echo)) as client:
        for wish in (True, False):
            await client.ask([USER], tools=TOOLS, parallel_tool_calls=wish)
        response = await client.post({"model": "m", "input": "hi", "parallel_tool_calls": False}, path="responses")
        assert response.status == 200
        assert client.endpoint.metrics()["gateway_ignored_parallel_tool_calls"] == 2


async def test_a_call_in_the_form_before_tool_calls_is_in_the_prompt() -> None:
    policy = Policy(echo)
    function = {"name": "add", "arguments": '{"a": 1}'}
    forms: list[dict[str, Any]] = [{"function_call": function}, {"tool_calls": [{"function": function}]}]
    async with rollout(policy) as client:
        for form in forms:
            await client.ask([USER, {"role": "assistant", "content": None, **form}, {"role": "tool", "content": "1"}])
    assert policy.asked[0][0] == policy.asked[1][0]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example:80", ""])
async def test_requests_must_be_addressed_to_this_machine(host: str) -> None:
    async with rollout(Policy(echo)) as client:
        response = await client.post({"messages": [USER]}, host=host)
        assert response.status == 403


async def test_the_key_opens_its_rollout_and_no_other() -> None:
    async with rollout(Policy(echo)) as client, rollout(Policy(echo), gateway=client.gateway) as other:
        body = json.dumps({"messages": [USER]}).encode()
        for headers in (
            {"authorization": f"Bearer {client.endpoint.api_key}"},
            {"authorization": f"bearer {client.endpoint.api_key}"},
            {"x-api-key": client.endpoint.api_key},
        ):
            response = await client.gateway.handle(
                "POST", "/v1/chat/completions", {"host": "localhost:1", **headers}, body
            )
            assert response.status == 200
        assert client.endpoint.metrics()["gateway_calls"] == 3
        assert other.endpoint.metrics()["gateway_calls"] == 0
        for path in ("/v1/chat/completions", "/r/x/v1/chat/completions", "/", "/r", "/r//v1/chat/completions"):
            assert (await client.gateway.handle("POST", path, {"host": "localhost"}, body)).status == 401
        assert (await client.post({"messages": [USER]}, path="files")).status == 404


async def test_an_agent_that_sends_too_much_is_stopped() -> None:
    async def play() -> None:
        async with rollout(Policy(echo), max_request_bytes=300) as client:
            await client.ask([USER])
            response = await client.post({"messages": [{"role": "user", "content": "x" * 300}]})
            assert response.status == 403
            assert json.loads(response.body)["error"]["code"] == "size_limit"

    with pytest.raises(Terminated, match="sent more than 300 bytes"):
        await play()


async def test_numbers_are_compared_by_value() -> None:
    """JavaScript writes 1.0 as 1."""
    policy = Policy(lambda prompt, seed: said("", None, ("add", {"a": 1.0, "b": 1e400 if seed < 0 else 2.5})))
    async with rollout(policy) as client:
        answer = await client.ask([USER], tools=TOOLS)
        answer["tool_calls"][0]["function"]["arguments"] = '{"b":2.5,"a":1}'
        await client.ask([USER, answer, *results(answer)], tools=TOOLS)
        assert segments(steps_of(client)) == [[0, 1]]


async def test_the_seconds_of_the_agent_are_measured() -> None:
    policy = Policy(echo)
    async with rollout(policy) as client:
        policy.hold = asyncio.Event()
        asking = asyncio.create_task(client.ask([USER]))
        await asyncio.sleep(0.3)
        policy.hold.set()
        await asking
        await asyncio.sleep(0.2)
    assert client.endpoint.metrics()["gateway_client_seconds"] >= 0.2


async def test_a_model_that_knows_a_bare_format_sees_neither_tools_nor_the_system() -> None:
    policy = Policy(calling)
    system = {"role": "system", "content": "be good"}
    async with rollout(policy, hide_tools=True, hide_system=True) as client:
        answer = await client.ask([system, USER], tools=TOOLS)
        await client.ask([system, USER, answer, *results(answer)], tools=TOOLS)
        prompts = [bytes(token for token in prompt if token < 256).decode() for prompt, _ in policy.asked]
        assert not any("be good" in prompt or "Adds." in prompt for prompt in prompts)
        assert segments(steps_of(client)) == [[0, 1]]
        assert (await client.post({"messages": [system]})).status == 400
        counting = {"model": "m", "messages": [{"role": "system", "content": "be good"}]}
        assert (await client.post(counting, "messages/count_tokens")).status == 400
        assert client.endpoint.failure is None, "it is the agent's own mistake"


async def test_an_answer_that_is_cut_off_says_so_whatever_it_calls() -> None:
    policy = Policy(lambda prompt, seed: said("", None, *CALLS) + "x" * 2000)
    async with rollout(policy) as client:
        response = await client.post({"messages": [USER], "max_tokens": len(said("", None, *CALLS))})
        [choice] = json.loads(response.body)["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"]
