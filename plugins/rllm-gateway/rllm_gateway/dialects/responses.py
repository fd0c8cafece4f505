"""OpenAI's Responses API."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rllm_gateway.bodies import Form
from rllm_gateway.calls import AnswerNode, ClientCall
from rllm_gateway.dialects.reading import Fields, function_tool, integer, items, text, token_logprobs
from rllm_gateway.errors import BadRequest
from rllm_gateway.history import History
from rllm_gateway.messages import normalized

SET_BY_RUN = ("temperature", "top_p", "top_logprobs", "reasoning")
LOGPROBS = "message.output_text.logprobs"
STATEFUL = ("background", "conversation", "prompt")
ID_PREFIX = "resp_"
OWN_ID = re.compile(r"(call_[0-9a-f]{16}_\d+)_\d+")

Event = tuple[str, dict[str, Any]]


def read(body: Mapping[str, Any], history: History, *, ignores: bool = False) -> ClientCall:
    """Reads a request.

    With ``previous_response_id``, ``instructions`` that differ from the conversation's first ones start a new
    conversation. Unlike OpenAI, a call without ``instructions`` keeps them, because clients leave out what does not
    change.

    Args:
        body: The request without its input.
        history: The request's instructions and input.
        ignores: Whether fields that cannot be honored are ignored.

    Raises:
        BadRequest: If the request is invalid, or asks for something unsupported.
    """
    fields = Fields(ignores=ignores)
    fields.decided_by_run(body, *SET_BY_RUN)
    for name in STATEFUL:
        if body.get(name):
            raise BadRequest(f"{name} is not supported: send the conversation as input, or previous_response_id")
    options = body.get("text")
    form = options.get("format") if isinstance(options, Mapping) else None
    if isinstance(form, Mapping) and form.get("type") not in (None, "text"):
        fields.not_honored("text.format", form.get("type"))
    if (choice := body.get("tool_choice")) not in (None, "auto", "none"):
        fields.not_honored("tool_choice", choice)
    fields.calls_in_turn(body)
    hides_tools = choice == "none" or body.get("tools") is None
    tools = [] if hides_tools else fields.tools(items(body, "tools"), _tool, types=("function",))
    after = text(body, "previous_response_id")
    include = [] if body.get("include") is None else items(body, "include")
    return ClientCall(
        history=history,
        tools=tools or None,
        model=text(body, "model") or "",
        max_tokens=integer(body, "max_output_tokens"),
        after=None if after is None else after.removeprefix(ID_PREFIX),
        instructions=None if after is None else text(body, "instructions"),
        ignored=fields.ignored,
        shows_logprobs=LOGPROBS in include,
    )


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise BadRequest(f"a tool must be an object, not {tool!r:.80}")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _leading(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    instructions = text(body, "instructions")
    if not instructions or body.get("previous_response_id") is not None:
        return []
    return [normalized({"role": "system", "content": instructions})]


def _messages(given: Any) -> list[dict[str, Any]]:
    """Returns the messages of ``input``, with the items of each answer joined into one message again."""
    if isinstance(given, str):
        return [normalized({"role": "user", "content": given})]
    if not isinstance(given, list) or not given:
        raise BadRequest(f"input must be text or a list of items that is not empty, not {given!r:.40}")
    found: list[dict[str, Any]] = []
    for message in map(_message, given):
        answer = _unfinished(found, message)
        if answer is None or not _joined(answer, message):
            found.append(message)
    return [normalized(message) for message in found]


FORM = Form("responses", "input", _leading, _messages)


def _unfinished(found: Sequence[dict[str, Any]], item: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the unfinished answer that an item may belong to.

    Some clients put each tool result right after its call. In that case, the ids show which calls belong to one answer.
    """
    if item["role"] != "assistant" or not found:
        return None
    answer = next((one for one in reversed(found) if one["role"] != "tool"), None)
    if answer is None or answer["role"] != "assistant":
        return None
    if found[-1] is answer:
        return answer
    shared = _shared_id(item)
    return answer if shared and shared == _shared_id(answer) else None


def _shared_id(message: Mapping[str, Any]) -> str:
    """Returns the prefix that the ids of all calls of one answer share; "" for ids that the gateway did not create."""
    [first, *_] = message.get("tool_calls") or [{}]
    found = OWN_ID.fullmatch(str(first.get("id")))
    return found[1] if found else ""


def _joined(answer: dict[str, Any], more: Mapping[str, Any]) -> bool:
    """Adds an item to an answer, unless the item starts a new one: an answer has one text, after its reasoning.

    The gateway compares whole answers to recognize what the policy wrote, so their items must be joined as they were.
    """
    if "tool_calls" in more:
        answer["tool_calls"] = [*answer.get("tool_calls", ()), *more["tool_calls"]]
    elif "content" in more:
        if "content" in answer:
            return False
        answer["content"] = more["content"]
    else:
        if answer.keys() != more.keys():
            return False
        answer["reasoning_content"] += "\n" + more["reasoning_content"]
    return True


def _message(item: Any) -> dict[str, Any]:
    """Returns an item as a message; an item of an answer becomes a part of one."""
    if not isinstance(item, Mapping):
        raise BadRequest(f"an item of input must be an object, not {type(item).__name__}")
    kind = item.get("type") or "message"
    if kind == "message":
        return {"role": item.get("role"), "content": _content(item.get("content"))}
    if kind == "function_call":
        called = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": called}]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning_content": _reasoning(item)}
    if kind == "item_reference":
        raise BadRequest("item_reference is not supported: send the item itself, or previous_response_id")
    raise BadRequest(
        f"an item of type {kind!r:.40} is not supported: use message, reasoning, function_call or function_call_output"
    )


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        {"type": "image_url", "image_url": part.get("image_url")}
        if isinstance(part, Mapping) and part.get("type") == "input_image"
        else part
        for part in content
    ]


def _reasoning(item: Mapping[str, Any]) -> str:
    """Returns the text of a reasoning item; some clients keep it under ``content``, others under ``summary``."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise BadRequest(f"content and summary of reasoning must be lists, not {type(parts).__name__}")
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str))


def written(call: ClientCall, answers: Sequence[AnswerNode]) -> dict[str, Any]:
    """Returns the response body with an answer."""
    [answer] = answers
    is_complete = answer.finish_reason != "length"
    status = "completed" if is_complete else "incomplete"
    now = int(time.time())
    return {
        "id": f"{ID_PREFIX}{answer.id}",
        "object": "response",
        "created_at": now,
        "completed_at": now if is_complete else None,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
        "instructions": None,
        "max_output_tokens": call.max_tokens,
        "metadata": {},
        "model": call.model,
        "output": _output(answer, status, token_logprobs(answer) if call.shows_logprobs else None),
        "parallel_tool_calls": True,
        "previous_response_id": None if call.after is None else f"{ID_PREFIX}{call.after}",
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in call.tools or ()],
        "top_p": None,
        "truncation": "disabled",
        "usage": _usage(answer),
        "user": None,
    }


def _output(answer: AnswerNode, status: str, logprobs: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns an answer as output items. Only the last one can be incomplete."""
    found: list[dict[str, Any]] = []
    if answer.reasoning:
        thought = {"type": "reasoning_text", "text": answer.reasoning}
        found.append({"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": [thought]})
    if answer.text or not answer.calls:
        # An empty answer becomes a message, too: without an item, it would be missing from the history that the client
        # repeats.
        logprobs = [] if logprobs is None else logprobs
        said = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": logprobs}
        found.append({"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "content": [said]})
    for index, called in enumerate(answer.calls):
        item = {"id": f"fc_{answer.id}_{index}", "type": "function_call", "call_id": called["id"]}
        found.append(item | called["function"])
    for item in found:
        item["status"] = "completed"
    found[-1]["status"] = status
    return found


def _usage(answer: AnswerNode) -> dict[str, Any]:
    prompt, sampled = answer.prompt_tokens, answer.sampled_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }


def events(call: ClientCall, answers: Sequence[AnswerNode], body: Mapping[str, Any]) -> Iterator[Event]:
    """Yields the events of a streamed response: the whole answer, as events that the client assembles."""
    for number, (name, data) in enumerate(_pieces(written(call, answers))):
        yield name, {"type": name, "sequence_number": number, **data}


def _pieces(whole: Mapping[str, Any]) -> Iterator[Event]:
    missing: dict[str, Any] = {"output": [], "usage": None, "incomplete_details": None, "completed_at": None}
    begun = {**whole, **missing, "status": "in_progress"}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(whole["output"]):
        is_call = item["type"] == "function_call"
        empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
        yield "response.output_item.added", {"output_index": index, "item": {**item, **empty, "status": "in_progress"}}
        where = {"item_id": item["id"], "output_index": index}
        yield from _of_call(item, where) if is_call else _of_parts(item, where)
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{whole['status']}", {"response": whole}


def _of_call(item: Mapping[str, Any], where: Mapping[str, Any]) -> Iterator[Event]:
    arguments = item["arguments"]
    yield "response.function_call_arguments.delta", {**where, "delta": arguments}
    yield "response.function_call_arguments.done", {**where, "name": item["name"], "arguments": arguments}


def _of_parts(item: Mapping[str, Any], where: Mapping[str, Any]) -> Iterator[Event]:
    for at, part in enumerate(item["content"]):
        here = {**where, "content_index": at}
        more = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
        yield "response.content_part.added", {**here, "part": part | {"text": ""}}
        yield f"response.{part['type']}.delta", {**here, "delta": part["text"], **more}
        yield f"response.{part['type']}.done", {**here, "text": part["text"], **more}
        yield "response.content_part.done", {**here, "part": part}
