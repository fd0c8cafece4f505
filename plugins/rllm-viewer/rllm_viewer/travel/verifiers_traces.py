"""``verifiers``: the ``traces.jsonl`` of Prime's verifiers (0.4), one rollout per line.

A trajectory becomes a trace: a graph of messages whose branches are unbroken token sequences. The tokens that a prompt
adds go to the answer's node, without mask: no record assigns them to messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rllm_core.errors import ConfigError
from rllm_core.types import Step, Trajectory
from rllm_core.version import __version__
from rllm_viewer.travel import rllm_extra
from rllm_viewer.travel.contract import Format, Imported, Located, Row, Source
from rllm_viewer.travel.conversations import JsonMessage, ToolCall, conversations_of
from rllm_viewer.travel.fields import ALL, Losses, json_of, same_json
from rllm_viewer.travel.rllm_extra import KEY
from rllm_viewer.travel.selection import Picked

IN_NODES = ("messages", "response", "tools", "prompt_ids", "completion_ids", "logprobs", "trained_advantages")
EPISODE = ("id", "env", "task", "group", "run", "ok", "is_timeout", "errors", "traces")
COUNTS = ("num_input_tokens", "num_output_tokens", "num_total_tokens")
TRACE = ("version", "id", "verifiers", "task", "agent", "tools", "nodes", "calls", "rewards", "metrics", "info")
TRACE_ENDS = ("is_completed", "ok", "stop_condition", "is_timeout", "errors", *COUNTS)
NODE = ("parent", "tools", "message", "sampled", "token_ids", "mask", "logprobs", "advantages", "timestamp")


def rows(chosen: Iterable[Picked], source: Source, losses: Losses) -> Iterator[Row]:
    """Yields one episode per rollout."""
    for one in chosen:
        episode, group = one.rollout.episode, one.group
        name = f"{source.name}/{episode.rollout_id or f'{group.task.task_id}/{episode.rollout_index}'}"
        errors = [{"type": "Error", "message": episode.error}] if episode.error else []
        ok = not episode.termination_reason.is_failure
        ended = {"ok": ok, "is_timeout": episode.termination_reason.value == "timeout", "errors": errors}
        task = {"type": "Task", "data": {"id": group.task.task_id, "info": json_of(group.task.data)}}
        # A rollout without a model call has a trace without nodes, which records how the rollout ended.
        trajectories: Sequence[Trajectory | None] = episode.trajectories or [None]
        work = {"type": "eval" if episode.is_validation else "train", "step": group.step}
        yield {
            "id": name,
            "env": {"id": str(source.tables.get("workflow", ""))},
            "task": task,
            "group": {"id": _group_id(one, source)},
            "run": {"type": "train", "id": source.name, "work": work},
            **ended,
            "traces": [
                {
                    "version": 1,
                    "id": f"{name}/{number}",
                    "verifiers": {"version": f"rllm-core {__version__}"},
                    "task": task,
                    **_trace(one, None if trajectory is None else number, source, losses),
                    "is_completed": True,
                    "stop_condition": episode.termination_reason.value,
                    **ended,
                }
                for number, trajectory in enumerate(trajectories)
            ],
        }


def _group_id(one: Picked, source: Source) -> str:
    group = one.group
    return f"{source.name}/{group.step}/{group.task.task_id if group.group is None else group.group}"


def _trace(one: Picked, number: int | None, source: Source, losses: Losses) -> Row:
    episode = one.rollout.episode
    own = rllm_extra.about(one, number)
    trajectory = Trajectory() if number is None else episode.trajectories[number]
    nodes: list[Row] = []
    calls: list[Row] = []
    exact: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    for conversation in conversations_of(trajectory.steps, losses):
        sampled = dict(zip(conversation.sampled, conversation.positions, strict=True))
        parent, before = None, 0
        for at, message in enumerate(conversation.json_messages()):
            node: Row = {"parent": parent, "message": _native(message), "sampled": at in sampled}
            node["timestamp"] = 0.0
            if parent is None and conversation.tools:
                node["tools"] = [_native_tool(tool) for tool in conversation.tools]
                if not same_json([_tool(tool) for tool in node["tools"]], conversation.tools):
                    exact[f"{len(nodes)}.tools"] = conversation.tools
            if not same_json(_message(node["message"]), message):
                exact[str(len(nodes))] = message
            if at in sampled:
                step = trajectory.steps[sampled[at]]
                node |= _tokens(step, before)
                before = len(step.prompt_ids) + len(step.completion_ids)
                more = rllm_extra.about_step(one, number or 0, sampled[at])
                if "trained_advantages" in more:
                    node["advantages"] = more["trained_advantages"]
                steps[str(len(nodes))] = {key: value for key, value in more.items() if key not in IN_NODES}
                calls.append(_call(step, len(nodes)))
            parent = len(nodes)
            nodes.append(node)
    if exact:
        own["exact"] = exact
    if steps:
        own["steps"] = {key: value for key, value in steps.items() if value}
    tools = [tool for node in nodes for tool in node.get("tools", ())]
    return {
        "agent": {
            "name": trajectory.role,
            "trainable": trajectory.trainable,
            "config": {"model": source.model},
        },
        "tools": list({tool["name"]: tool for tool in tools}.values()),
        "nodes": nodes,
        "calls": calls,
        "rewards": {"reward": {"score": trajectory.total_reward}} if trajectory.has_reward else {},
        "metrics": dict(episode.metrics),
        "info": {KEY: own},
    }


def _tokens(step: Step, before: int) -> Row:
    if not len(step.completion_ids):
        return {}
    added = json_of(step.prompt_ids)[before:]
    completion = json_of(step.completion_ids)
    found = {
        "token_ids": [*added, *completion],
        "mask": [False] * len(added) + [True] * len(completion),
    }
    return found if step.logprobs is None else found | {"logprobs": json_of(step.logprobs)}


def _call(step: Step, node: int) -> Row:
    reason = {"length": "length"}.get(step.finish_reason.value, "stop")
    usage = {"prompt_tokens": len(step.prompt_ids), "completion_tokens": len(step.completion_ids)}
    return {"node": node, "finish_reason": reason, "usage": usage}


def _native(message: JsonMessage) -> Row:
    """Converts a message to the format of verifiers; `_message` checks whether the result is exact."""
    role, content = message["role"], message.get("content")
    if isinstance(content, list):
        content = [part for part in content if isinstance(part, Mapping) and part.get("type") in ("text", "image_url")]
    if role == "assistant":
        text = content if isinstance(content, str) or content is None else ""
        found: Row = {"role": role, "content": text}
        if isinstance(message.get("reasoning_content"), str):
            found["reasoning_content"] = message["reasoning_content"]
        if calls := message.get("tool_calls"):
            found["tool_calls"] = [_native_call(ToolCall.of(call, at)) for at, call in enumerate(calls)]
        return found
    if role == "tool":
        found = {"role": role, "tool_call_id": str(message.get("tool_call_id") or ""), "content": content or ""}
        return found | ({"name": message["name"]} if isinstance(message.get("name"), str) else {})
    return {"role": role if role in ("system", "user") else "system", "content": content or ""}


def _native_call(call: ToolCall) -> Row:
    arguments = call.arguments if isinstance(call.arguments, str) else ""
    return {"id": call.call_id, "name": call.name, "arguments": arguments}


def _message(native: Mapping[str, Any]) -> JsonMessage:
    found = {key: value for key, value in native.items() if value is not None or key == "content"}
    if native.get("tool_calls"):
        found["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in native["tool_calls"]
        ]
    return found


def _native_tool(tool: Any) -> Row:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    found = {key: function[key] for key in ("name", "description", "parameters", "strict") if key in function}
    return {"type": "function", "name": "", **found}


def _tool(native: Mapping[str, Any]) -> Row:
    function = {key: value for key, value in native.items() if key != "type" and value is not None}
    return {"type": native.get("type", "function"), "function": function}


def read(located: Iterable[Located], losses: Losses) -> Iterator[Imported]:
    """Yields one trajectory per trace; each sampled node becomes a step."""
    for one in located:
        if not isinstance(one.row.get("traces"), list) or not isinstance(one.row.get("task"), dict):
            raise ConfigError(
                f"{one.where} is not an episode of verifiers 0.4 (traces.jsonl): it has no traces or no task"
            )
        losses.unread("episode", one.row, (*EPISODE, *COUNTS))
        try:
            yield from _episode(one, losses)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{one.where} is not a valid episode: {type(error).__name__}: {error}") from error


def _episode(one: Located, losses: Losses) -> Iterator[Imported]:
    row = one.row
    data = row["task"]["data"]
    errors = [f"{error['type']}: {error['message']}" for error in row.get("errors") or ()]
    task_id = str(data.get("id") or row["task"].get("key") or data.get("idx") or one.where)
    group = (row.get("group") or {}).get("id")
    for number, trace in enumerate(row["traces"] or [{}]):
        losses.unread("trace", trace, (*TRACE, *TRACE_ENDS))
        info = trace.get("info") or {}
        imported = Imported(
            one.where,
            task={"task_id": task_id, "data": data.get("info", data)},
            rollout={"rollout_id": str(row.get("id") or "")} | ({"error": errors[-1]} if errors else {}),
            trajectory={"number": number, "role": (trace.get("agent") or {}).get("name", "agent")},
            together=group,
        )
        if KEY in info:
            imported.rollout = {}
            if "trajectory" not in info[KEY]:
                imported.trajectory = {}
            rllm_extra.read_into(imported, info[KEY])
        else:
            losses.unread("trace.info", info, ())
            _theirs(imported, trace, row, losses)
        imported.steps = _steps(trace, info.get(KEY) or {}, losses)
        yield imported


def _theirs(imported: Imported, trace: Mapping[str, Any], row: Mapping[str, Any], losses: Losses) -> None:
    """Adds the facts that a third-party trace has about its rollout."""
    rewards = [reward for reward in (trace.get("rewards") or {}).values() if reward is not None]
    if rewards:
        losses.add("trace.rewards (several, added up)", len(rewards) > 1)
        imported.trajectory["reward"] = sum(reward["score"] * reward.get("weight", 1.0) for reward in rewards)
    imported.trajectory["trainable"] = bool((trace.get("agent") or {}).get("trainable", True))
    metrics = {name: value for name, value in (trace.get("metrics") or {}).items() if value is not None}
    imported.rollout |= {"metrics": metrics} if metrics else {}
    if not row.get("ok", True):
        imported.rollout["termination_reason"] = "timeout" if row.get("is_timeout") else "error"


def _steps(trace: Mapping[str, Any], own: Mapping[str, Any], losses: Losses) -> list[dict[str, Any]]:
    nodes = trace.get("nodes") or []
    exact, more = own.get("exact") or {}, own.get("steps") or {}
    found = []
    for at, node in enumerate(nodes):
        losses.unread("node", node, NODE)
        if not node.get("sampled"):
            continue
        path = _path(nodes, at)
        first = nodes[path[0]]
        mask = node.get("mask") or []
        cut = mask.index(True) if True in mask else len(mask)
        sampled = sum(mask)
        ids = node.get("token_ids") or []
        if not all(mask[cut : cut + sampled]) or cut + sampled != len(ids):
            losses.add("node.token_ids (whose sampled tokens are not the last ones)")
            ids, cut = [], 0
        fields: dict[str, Any] = {
            "messages": [exact.get(str(each)) or _message(nodes[each]["message"]) for each in path[:-1]],
            "response": exact.get(str(at)) or _message(node["message"]),
            "tools": exact.get(f"{path[0]}.tools") or [_tool(tool) for tool in first.get("tools") or ()],
            "prompt_ids": [id_ for each in path[:-1] for id_ in nodes[each].get("token_ids") or ()] + ids[:cut],
            "completion_ids": ids[cut:],
            **(more.get(str(at)) or {}),
        }
        if node.get("logprobs"):
            fields["logprobs"] = node["logprobs"]
        if node.get("advantages") is not None:
            fields["trained_advantages"] = node["advantages"]
        found.append(fields)
    return found


def _path(nodes: Sequence[Mapping[str, Any]], at: int) -> list[int]:
    path, seen = [at], {at}
    while (parent := nodes[path[-1]].get("parent")) is not None:
        if parent in seen:
            raise ValueError(f"node {at} is its own ancestor")
        seen.add(parent)
        path.append(parent)
    return path[::-1]


FORMAT = Format("verifiers", "traces.jsonl of Prime's verifiers 0.4", ALL, (".jsonl",), rows, read)
