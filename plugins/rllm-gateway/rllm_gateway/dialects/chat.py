"""OpenAI's chat completions API."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rllm_gateway.bodies import Form
from rllm_gateway.calls import AnswerNode, ClientCall
from rllm_gateway.dialects.reading import Fields, function_tool, integer, items, listed, text, texts, token_logprobs
from rllm_gateway.errors import BadRequest
from rllm_gateway.history import History
from rllm_gateway.messages import normalized

SET_BY_RUN = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "reasoning_effort",
    "top_logprobs",
)


def read(body: Mapping[str, Any], history: History, *, ignores: bool = False) -> ClientCall:
    """Reads a request.

    Args:
        body: The request without its messages.
        history: The request's messages.
        ignores: Whether fields that cannot be honored are ignored.

    Raises:
        BadRequest: If the request is invalid, or asks for something unsupported.
    """
    fields = Fields(ignores=ignores)
    fields.decided_by_run(body, *SET_BY_RUN)
    if body.get("logit_bias"):
        raise BadRequest("logit_bias is not supported")
    if body.get("functions"):  # ignored, they would be missing from the prompt without a word
        raise BadRequest("functions is not supported: send them as tools")
    form = body.get("response_format")
    if isinstance(form, Mapping) and form.get("type") not in (None, "text"):
        fields.not_honored("response_format", form.get("type"))
    if (choice := body.get("tool_choice")) not in (None, "auto", "none"):
        fields.not_honored("tool_choice", choice)
    fields.calls_in_turn(body)
    hides_tools = choice == "none" or not body.get("tools")
    tools = [] if hides_tools else fields.tools(items(body, "tools"), _tool, types=("function", None))
    return ClientCall(
        history=history,
        tools=tools or None,
        model=text(body, "model") or "",
        max_tokens=integer(body, "max_completion_tokens", "max_tokens"),
        stop_texts=texts(body, "stop"),
        count=integer(body, "n") or 1,
        ignored=fields.ignored,
        shows_logprobs=bool(body.get("logprobs")),
    )


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise BadRequest(f"a tool must be an object with a function, not {tool!r:.80}")
    return function_tool(function.get("name"), function.get("description"), function.get("parameters"))


def _messages(given: Any) -> list[dict[str, Any]]:
    return [normalized(message) for message in listed(given, "messages")]


FORM = Form("chat/completions", "messages", lambda body: [], _messages)


def written(call: ClientCall, answers: Sequence[AnswerNode]) -> dict[str, Any]:
    """Returns the response body with the answers."""
    return {
        "id": f"chatcmpl-{answers[0].id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": call.model,
        "choices": [
            {
                "index": index,
                "message": _message(answer),
                "logprobs": _logprobs(call, answer),
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(answers)
        ],
        "usage": _usage(answers),
    }


def _logprobs(call: ClientCall, answer: AnswerNode) -> dict[str, Any] | None:
    return {"content": token_logprobs(answer), "refusal": None} if call.shows_logprobs else None


def _message(answer: AnswerNode) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [dict(call) for call in answer.calls]
    elif message["content"] is None:
        message["content"] = ""
    return message


def _usage(answers: Sequence[AnswerNode]) -> dict[str, int]:
    prompt, sampled = answers[0].prompt_tokens, sum(answer.sampled_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def events(
    call: ClientCall, answers: Sequence[AnswerNode], body: Mapping[str, Any]
) -> Iterator[tuple[str | None, Any]]:
    """Yields the events of a streamed response: the whole answers, as chunks that the client assembles."""
    whole = written(call, answers)
    base = {key: whole[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

    def chunk(
        index: int, delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None
    ) -> tuple[None, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return None, base | {"choices": [choice]}

    for choice in whole["choices"]:
        index, message = choice["index"], choice["message"]
        yield chunk(index, {"role": "assistant", "content": ""}, logprobs=choice["logprobs"])
        if message.get("reasoning_content"):
            yield chunk(index, {"reasoning_content": message["reasoning_content"]})
        if message["content"]:
            yield chunk(index, {"content": message["content"]})
        for at, called in enumerate(message.get("tool_calls") or ()):
            yield chunk(index, {"tool_calls": [{"index": at, **called}]})
        yield chunk(index, {}, choice["finish_reason"])
    options = body.get("stream_options")
    if isinstance(options, Mapping) and options.get("include_usage"):
        yield None, base | {"choices": [], "usage": whole["usage"]}
    yield None, "[DONE]"
