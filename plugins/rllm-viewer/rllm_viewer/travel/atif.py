"""``atif``: Harbor's Agent Trajectory Interchange Format (ATIF-v1.7), one document per conversation.

Documents of one rollout share its ``session_id``. Fields that the format lacks go under ``extra.rllm_core``, as do
messages that its steps cannot express exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rllm_core.errors import ConfigError
from rllm_core.version import __version__
from rllm_viewer.travel import rllm_extra
from rllm_viewer.travel.contract import Format, Imported, Located, Row, Source
from rllm_viewer.travel.conversations import JsonMessage, StepConversation, ToolCall, conversations_of
from rllm_viewer.travel.fields import ALL, Losses, json_of, same_json
from rllm_viewer.travel.rllm_extra import KEY
from rllm_viewer.travel.selection import Picked

SCHEMA = "ATIF-v1.7"
IN_METRICS = ("prompt_ids", "completion_ids", "logprobs")
DOCUMENT = ("schema_version", "session_id", "trajectory_id", "agent", "steps", "extra", "final_metrics")
STEP = ("step_id", "source", "message", "reasoning_content", "tool_calls", "observation", "metrics")
STEP_MARKS = ("llm_call_count", "is_copied_context", "extra")
METRICS = ("prompt_tokens", "completion_tokens", "prompt_token_ids", "completion_token_ids", "logprobs")


def rows(chosen: Iterable[Picked], source: Source, losses: Losses) -> Iterator[Row]:
    """Yields one document per conversation."""
    for one in chosen:
        trajectories = one.rollout.episode.trajectories
        if not any(trajectory.steps for trajectory in trajectories):
            losses.add("rollout (without a model call)")
        for number, trajectory in enumerate(trajectories):
            if trajectories and not trajectory.steps:
                losses.add("trajectory (without a model call)")
            for part, conversation in enumerate(conversations_of(trajectory.steps, losses)):
                yield _document(one, number, part, conversation, source)


def _document(one: Picked, number: int, part: int, conversation: StepConversation, source: Source) -> Row:
    episode = one.rollout.episode
    trajectory = episode.trajectories[number]
    session = episode.rollout_id or f"{source.name}-{one.group.task.task_id}-{episode.rollout_index}"
    extra: Row = {KEY: rllm_extra.about(one, number)}
    if trajectory.has_reward:
        extra["reward"] = trajectory.total_reward
    agent: Row = {"name": trajectory.role, "version": __version__, "model_name": source.model}
    if conversation.tools:
        agent["tool_definitions"] = conversation.tools
    return {
        "schema_version": SCHEMA,
        "session_id": session,
        "trajectory_id": f"{session}/{number}/{part}",
        "agent": agent,
        "steps": _steps(one, number, conversation),
        "final_metrics": {
            "total_prompt_tokens": sum(len(step.prompt_ids) for step in conversation.steps),
            "total_completion_tokens": sum(len(step.completion_ids) for step in conversation.steps),
        },
        "extra": extra,
    }


def _steps(one: Picked, number: int, conversation: StepConversation) -> list[Row]:
    sampled = dict(zip(conversation.sampled, zip(conversation.positions, conversation.steps, strict=True), strict=True))
    steps: list[Row] = []
    for at, message in enumerate(conversation.json_messages()):
        if message["role"] == "tool" and steps and steps[-1]["source"] == "agent":
            _observe(steps[-1], message)
            continue
        step = {"step_id": len(steps) + 1, **_native(message)}
        extra: Row = {}
        if not same_json(_messages_of(step)[0], message):
            extra["message"] = message
        if at in sampled:
            position, called = sampled[at]
            step["llm_call_count"] = 1
            step["metrics"] = {
                "prompt_tokens": len(called.prompt_ids),
                "completion_tokens": len(called.completion_ids),
            }
            if len(called.completion_ids):
                step["metrics"] |= {
                    "prompt_token_ids": json_of(called.prompt_ids),
                    "completion_token_ids": json_of(called.completion_ids),
                }
            if called.logprobs is not None:
                step["metrics"]["logprobs"] = json_of(called.logprobs)
            own = rllm_extra.about_step(one, number, position, "messages", "response", "tools", *IN_METRICS)
            extra |= {"step": own} if own else {}
        elif message["role"] == "assistant":
            step["is_copied_context"] = True
        if extra:
            step["extra"] = {KEY: extra}
        steps.append(step)
    return steps


def _native(message: JsonMessage) -> Row:
    """Returns a message as a step; `_messages_of` checks whether the step is exact."""
    content = message.get("content")
    text = content if isinstance(content, str) else "\n".join(_texts(content))
    source = {"assistant": "agent", "user": "user"}.get(message["role"], "system")
    step: Row = {"source": source, "message": text}
    if source == "agent":
        if isinstance(message.get("reasoning_content"), str):
            step["reasoning_content"] = message["reasoning_content"]
        if calls := message.get("tool_calls"):
            step["tool_calls"] = [_native_call(ToolCall.of(call, at)) for at, call in enumerate(calls)]
    return step


def _texts(content: Any) -> list[str]:
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]


def _native_call(call: ToolCall) -> Row:
    return {"tool_call_id": call.call_id, "function_name": call.name, "arguments": call.parsed_arguments}


def _observe(step: Row, message: JsonMessage) -> None:
    """Adds a tool's answer to the step that called it."""
    known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    content = message.get("content")
    result: Row = {"content": content if isinstance(content, str) else "\n".join(_texts(content))}
    if message.get("tool_call_id") in known:
        result["source_call_id"] = message["tool_call_id"]
    if not same_json(_tool_message(result), message):
        result["extra"] = {KEY: {"message": message}}
    step.setdefault("observation", {"results": []})["results"].append(result)


def _tool_message(result: Mapping[str, Any]) -> JsonMessage:
    if isinstance(own := _own(result).get("message"), dict):
        return own
    found = {"role": "tool", "content": result.get("content")}
    if result.get("source_call_id") is not None:
        found["tool_call_id"] = result["source_call_id"]
    return found


def _messages_of(step: Mapping[str, Any]) -> list[JsonMessage]:
    """Returns the messages of a step: its own, and the tool results."""
    if isinstance(own := _own(step).get("message"), dict):
        message: JsonMessage = own
    else:
        role = {"agent": "assistant"}.get(step["source"], step["source"])
        message = {"role": role, "content": step.get("message")}
        if step.get("reasoning_content") is not None:
            message["reasoning_content"] = step["reasoning_content"]
        if step.get("tool_calls"):
            message["tool_calls"] = [
                {
                    "id": call["tool_call_id"],
                    "type": "function",
                    "function": {"name": call["function_name"], "arguments": json.dumps(call["arguments"])},
                }
                for call in step["tool_calls"]
            ]
    results = (step.get("observation") or {}).get("results", ())
    return [message, *map(_tool_message, results)]


def _own(record: Mapping[str, Any]) -> Mapping[str, Any]:
    found = (record.get("extra") or {}).get(KEY)
    return found if isinstance(found, Mapping) else {}


def read(located: Iterable[Located], losses: Losses) -> Iterator[Imported]:
    """Yields the steps of each document: one per agent step that is not copied from another document."""
    for one in located:
        if not str(one.row.get("schema_version", "")).startswith("ATIF-") or not isinstance(one.row.get("steps"), list):
            raise ConfigError(f"{one.where} is not an ATIF trajectory: it has no schema_version ATIF-v1.N, or no steps")
        try:
            yield _read(one, losses)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{one.where} is not a valid ATIF trajectory: {type(error).__name__}: {error}") from error


def _read(one: Located, losses: Losses) -> Imported:
    row = one.row
    losses.unread("trajectory", row, DOCUMENT)
    agent = row["agent"]
    losses.unread("trajectory.agent", agent, ("name", "version", "model_name", "tool_definitions"))
    imported = Imported(one.where, trajectory={"role": agent["name"]})
    rllm_extra.read_into(imported, _own(row))
    if KEY not in (row.get("extra") or {}):
        if row.get("session_id"):
            imported.rollout["rollout_id"] = imported.together = str(row["session_id"])
        losses.unread("trajectory.extra", row.get("extra") or {}, ("reward",))
        reward = (row.get("extra") or {}).get("reward")
        if isinstance(reward, int | float):
            imported.trajectory["reward"] = reward
    tools, messages = agent.get("tool_definitions") or [], list[JsonMessage]()
    for step in row["steps"]:
        losses.unread("step", step, (*STEP, *STEP_MARKS))
        said = _messages_of(step)
        if step["source"] == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0:
            imported.steps.append(_step(step, messages, said[0], tools, losses))
        messages = [*messages, *said]
    return imported


def _step(
    step: Mapping[str, Any], before: Sequence[JsonMessage], answer: JsonMessage, tools: Sequence[Any], losses: Losses
) -> dict[str, Any]:
    metrics = step.get("metrics") or {}
    losses.unread("step.metrics", metrics, METRICS)
    fields = {
        "messages": before,
        "response": answer,
        "tools": tools,
        "prompt_ids": metrics.get("prompt_token_ids") or [],
        "completion_ids": metrics.get("completion_token_ids") or [],
        **_own(step).get("step", {}),
    }
    if metrics.get("logprobs") is not None:
        fields["logprobs"] = metrics["logprobs"]
    return fields


FORMAT = Format("atif", "Harbor's agent trajectories (ATIF)", ALL, (".jsonl", ".json"), rows, read)
