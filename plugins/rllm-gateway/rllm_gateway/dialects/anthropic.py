"""Anthropic's Messages API, with its endpoint that counts tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rllm_gateway.bodies import Form
from rllm_gateway.calls import AnswerNode, ClientCall
from rllm_gateway.dialects.reading import Fields, function_tool, integer, items, listed, text, texts
from rllm_gateway.errors import BadRequest
from rllm_gateway.history import History
from rllm_gateway.messages import normalized

SET_BY_RUN = ("temperature", "top_p", "top_k")
ROLES = ("user", "assistant", "system")
# Frameworks drop thinking that has no signature. Any value will do, because only Anthropic can check one.
SIGNATURE = "rllm"
# The input of a tool must be an object. If the policy wrote something else, its text goes into this field.
UNPARSED = "_unparsed_arguments"
STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}


@dataclass(slots=True)
class MessagesCall(ClientCall):
    """A call of the Messages API.

    Attributes:
        shows_thinking: Whether the request asks for thinking. Frameworks that did not ask for it turn it into a user
            message, which edits the history.
    """

    shows_thinking: bool = False


def read(body: Mapping[str, Any], history: History, *, ignores: bool = False) -> ClientCall:
    """Reads a request.

    Args:
        body: The request without its messages.
        history: The request's system message and messages.
        ignores: Whether fields that cannot be honored are ignored.

    Raises:
        BadRequest: If the request is invalid, or asks for something unsupported.
    """
    call = read_to_count(body, history, ignores=ignores)
    call.max_tokens = integer(body, "max_tokens")
    if call.max_tokens is None:
        raise BadRequest("max_tokens is required: the maximum length of the answer in tokens")
    if next((message["role"] == "assistant" for _, message, _ in history.backwards()), False):
        raise BadRequest("the last message must not be the assistant's: the policy does not continue a given answer")
    return call


def read_to_count(body: Mapping[str, Any], history: History, *, ignores: bool = False) -> ClientCall:
    """Reads a request to count the tokens of a prompt; it needs fewer fields than a request for an answer.

    Args:
        body: The request without its messages.
        history: The request's system message and messages.
        ignores: Whether fields that cannot be honored are ignored.

    Raises:
        BadRequest: If the request is invalid, or asks for something unsupported.
    """
    fields = Fields(ignores=ignores)
    fields.decided_by_run(body, *SET_BY_RUN)
    output = _object(body, "output_config")
    fields.decided_by_run(output, "effort")
    if output.get("format") is not None:
        fields.not_honored("output_config.format", output["format"])
    choice = _object(body, "tool_choice")
    if choice.get("type") not in (None, "auto", "none"):
        fields.not_honored("tool_choice", choice["type"])
    if choice.get("disable_parallel_tool_use"):
        fields.not_honored("tool_choice.disable_parallel_tool_use", True)
    if body.get("thread") is not None:
        # In a thread, the SDK's tool runner sends only new messages. After this error code it sends the whole
        # conversation.
        raise BadRequest("thread is not supported: send the whole conversation", code="thread_unsupported_request")
    if body.get("mcp_servers"):
        raise BadRequest("mcp_servers are not supported: the agent must execute its tools itself")
    hides_tools = choice.get("type") == "none" or body.get("tools") is None
    tools = [] if hides_tools else fields.tools(items(body, "tools"), _tool, types=("custom", None))
    return MessagesCall(
        history=history,
        tools=tools or None,
        model=text(body, "model") or "",
        stop_texts=texts(body, "stop_sequences"),
        ignored=fields.ignored,
        shows_thinking=_object(body, "thinking").get("type") in ("enabled", "adaptive"),
    )


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadRequest(f"{name} must be an object, not {value!r:.40}")
    return value


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise BadRequest(f"a tool must be an object with a name and an input_schema, not {tool!r:.80}")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _system(system: Any) -> Iterator[dict[str, Any]]:
    if parts := [_text(block) for block in _blocks(system)]:
        yield {"role": "system", "content": parts}


def _messages(message: Any) -> Iterator[dict[str, Any]]:
    """Yields a message in the format of chat completions, where each tool result is a message of its own."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        raise BadRequest(f"a message must be an object with a role: {', '.join(ROLES)}; not {message!r:.80}")
    blocks = _blocks(message.get("content"))
    if role == "assistant":
        yield _assistant(blocks)
    elif role == "system":
        yield from _system(message.get("content"))
    else:
        results = [block for block in blocks if block.get("type") == "tool_result"]
        for block in results:
            # Its is_error flag is dropped: no template has a field for it, and the text itself describes the error.
            content = [_part(one) for one in _blocks(block.get("content"))]
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
        if len(results) < len(blocks) or not results:
            yield {"role": "user", "content": [_part(one) for one in blocks if one.get("type") != "tool_result"]}


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    parts, thoughts, calls = [], [], []
    for block in blocks:
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass  # encrypted by another provider's model, so there is nothing to read
            case "tool_use":
                function = {"name": block.get("name"), "arguments": _arguments(block.get("input"))}
                calls.append({"id": block.get("id"), "function": function})
            case _:
                parts.append(_text(block))
    return {"role": "assistant", "content": parts, "reasoning_content": "".join(thoughts), "tool_calls": calls}


def _arguments(given: Any) -> str:
    """Returns a call's arguments; for input that is not an object, the policy's own text, by which it is recognized."""
    if isinstance(given, Mapping) and list(given) == [UNPARSED]:
        return str(given[UNPARSED])
    return json.dumps(given or {}, ensure_ascii=False)


def _blocks(content: Any) -> Sequence[Mapping[str, Any]]:
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise BadRequest(f"content must be text or a list of blocks, not {content!r:.80}")
    return content


def _text(block: Mapping[str, Any]) -> dict[str, Any]:
    if block.get("type") != "text":
        raise BadRequest(f"a block of type {block.get('type')!r} is not supported here: use text")
    return {"type": "text", "text": block.get("text")}


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    match block:
        case {"type": "text"}:
            return _text(block)
        case {"type": "image", "source": {"type": "base64", "media_type": str(kind), "data": str(data)}}:
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case {"type": "image"}:
            raise BadRequest("an image must have a base64 source, because nothing is fetched from the network")
    raise BadRequest(f"a block of type {block.get('type')!r} is not supported here: use text or image")


def _all_messages(given: Any) -> list[dict[str, Any]]:
    return [normalized(message) for one in listed(given, "messages") for message in _messages(one)]


FORM = Form(
    "messages",
    "messages",
    lambda body: [normalized(message) for message in _system(body.get("system"))],
    _all_messages,
)


def counted(tokens: int) -> dict[str, Any]:
    """Returns the response body with the number of tokens of a prompt."""
    return {"input_tokens": tokens}


def written(call: ClientCall, answers: Sequence[AnswerNode]) -> dict[str, Any]:
    """Returns the response body with an answer."""
    [answer] = answers
    stop_reason, stop_sequence = _end(call, answer)
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": list(_content(call, answer)),
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "output_tokens": answer.sampled_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def _content(call: ClientCall, answer: AnswerNode) -> Iterator[dict[str, Any]]:
    if answer.reasoning and isinstance(call, MessagesCall) and call.shows_thinking:
        yield {"type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE}
    if answer.text or not answer.calls:  # also for an empty answer, because agents read its first block
        yield {"type": "text", "text": answer.text}
    for called in answer.calls:
        function = called["function"]
        yield {
            "type": "tool_use",
            "id": called["id"],
            "name": function["name"],
            "input": _input(function["arguments"]),
        }


def _input(arguments: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError):  # such as a list, or NaN, which is not JSON
        return {UNPARSED: arguments}
    return found


def _end(call: ClientCall, answer: AnswerNode) -> tuple[str, str | None]:
    """Returns the reason why an answer ended, and its stop text."""
    said = f"{answer.reasoning or ''}\n{answer.step.text}"
    found = [(at, len(stop), stop) for stop in call.stop_texts if (at := said.find(stop)) >= 0]
    if found and not answer.calls:
        return "stop_sequence", min(found)[-1]
    return STOP_REASONS.get(answer.finish_reason, "end_turn"), None


def events(
    call: ClientCall, answers: Sequence[AnswerNode], body: Mapping[str, Any]
) -> Iterator[tuple[str | None, Any]]:
    """Yields the events of a streamed response: the whole answer, as events that the client assembles."""

    def event(kind: str, **data: Any) -> tuple[str, Any]:
        return kind, {"type": kind, **data}

    whole = written(call, answers)
    usage, end = whole["usage"], {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    begun = whole | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}
    yield event("message_start", message=begun)
    for index, block in enumerate(whole["content"]):
        empty, deltas = _deltas(block)
        yield event("content_block_start", index=index, content_block=block | empty)
        for delta in deltas:
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    yield event("message_delta", delta=end, usage=usage)
    yield event("message_stop")


def _deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns a block's empty form, which starts it, and the deltas that fill it."""
    match block["type"]:
        case "thinking":
            thought = {"type": "thinking_delta", "thinking": block["thinking"]}
            signed = {"type": "signature_delta", "signature": block["signature"]}
            return {"thinking": "", "signature": ""}, [thought, signed]
        case "tool_use":
            text = msgspec.json.encode(block["input"]).decode()
            return {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    return {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
