"""Request parsing that the dialects share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rllm_gateway.calls import AnswerNode
from rllm_gateway.errors import BadRequest

MAX_STOP_TEXTS = 16
IGNORE = 'set agent.unsupported_fields = "ignore"'


def integer(body: Mapping[str, Any], *names: str) -> int | None:
    """Returns the first of several fields that is set; it must be a positive integer.

    Raises:
        BadRequest: If the value is not a positive integer.
    """
    for name in names:
        value = body.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise BadRequest(f"{name} must be a positive integer, not {value!r}")
            return value
    return None


def texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Returns the stop texts in a field.

    Raises:
        BadRequest: If the field holds anything else.
    """
    value = body.get(name)
    if value is None:
        return ()
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else (None,)
    if len(found) > MAX_STOP_TEXTS or not all(isinstance(one, str) and one for one in found):
        raise BadRequest(f"{name} must be up to {MAX_STOP_TEXTS} texts that are not empty")
    return found


def items(body: Mapping[str, Any], name: str) -> list[Any]:
    """Returns the list in a field.

    Raises:
        BadRequest: If the field holds anything else.
    """
    return listed(body.get(name), name)


def listed(value: Any, name: str) -> list[Any]:
    """Returns the value of a field, which must be a list.

    Raises:
        BadRequest: If the value is not a list.
    """
    if not isinstance(value, list):
        raise BadRequest(f"{name} must be a list, not {type(value).__name__}")
    return value


def text(body: Mapping[str, Any], name: str) -> str | None:
    """Returns the text of a field.

    Raises:
        BadRequest: If the field holds anything else.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{name} must be text, not {value!r:.40}")
    return value


def token_logprobs(answer: AnswerNode) -> list[dict[str, Any]] | None:
    """Returns the log-probability of every sampled token, including tool calls and the stop token.

    None if the engine does not report log-probabilities.
    """
    logprobs = answer.step.logprobs
    if logprobs is None:
        return None
    return [
        {"token": spelled.decode(errors="replace"), "logprob": logprob, "bytes": list(spelled), "top_logprobs": []}
        for spelled, logprob in zip(answer.tokens, logprobs.tolist(), strict=True)
    ]


def function_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Returns a tool in the format of chat completions.

    Raises:
        BadRequest: If the tool has no name.
    """
    if not isinstance(name, str) or not name:
        raise BadRequest("a tool needs a name")
    function: dict[str, Any] = {"name": name}
    if isinstance(description, str):
        function["description"] = description
    function["parameters"] = parameters if isinstance(parameters, Mapping) else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


class Fields:
    """Request fields that the policy cannot honor.

    Args:
        ignores: Whether the run file tells the gateway to ignore fields that an agent may rely on.
    """

    def __init__(self, *, ignores: bool) -> None:
        self.ignored: list[str] = []
        self._ignores = ignores

    def decided_by_run(self, body: Mapping[str, Any], *names: str) -> None:
        """Records the fields that the run file decides, such as the temperature."""
        self.ignored += [name for name in names if body.get(name) is not None]

    def calls_in_turn(self, body: Mapping[str, Any]) -> None:
        """Records that the policy may make several calls, although the client wants one. Codex always asks for one."""
        if body.get("parallel_tool_calls") is False:
            self.ignored.append("parallel_tool_calls")

    def not_honored(self, name: str, value: Any) -> None:
        """Refuses a field that an agent relies on, unless the run file tells the gateway to ignore it.

        Raises:
            BadRequest: If the field is not ignored.
        """
        if not self._ignores:
            raise BadRequest(
                f"{name} = {str(value)[:80]} cannot be honored, because sampling is not constrained: remove it from "
                f"the request, or {IGNORE}",
                code="unsupported_field",
            )
        self.ignored.append(name)

    def tools(
        self, given: Sequence[Any], read: Callable[[Any], dict[str, Any]], *, types: Sequence[str | None]
    ) -> list[dict[str, Any]]:
        """Returns the tools that the agent itself executes. Refuses others, such as the provider's web search.

        Args:
            given: The tools of the request.
            read: Reads a tool.
            types: Types of the tools that the agent executes.

        Raises:
            BadRequest: If there is another tool, and the run file does not allow ignoring it.
        """
        found = []
        for tool in given:
            if isinstance(tool, Mapping) and tool.get("type") not in types:
                if not self._ignores:
                    raise BadRequest(
                        f"the agent must execute its tools itself, unlike {dict(tool)!r:.80}: remove it, or {IGNORE}",
                        code="unsupported_field",
                    )
                self.ignored.append("tools")
            else:
                found.append(read(tool))
        return found
