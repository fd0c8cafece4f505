"""``inspect``: an evaluation log of Inspect as JSON, with one sample per rollout and one model event per call.

Inspect has no place for token ids. The prompts of a sample share a pool of messages, as Inspect itself writes them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rllm_core.errors import ConfigError
from rllm_core.run_folder.groups import MEASURES
from rllm_core.types import Step
from rllm_core.version import __version__
from rllm_viewer.travel import rllm_extra
from rllm_viewer.travel.contract import Format, Imported, Located, Row, Source
from rllm_viewer.travel.conversations import conversations_of, steps_from
from rllm_viewer.travel.fields import ALL, TOKENS, Losses, changed, same_json
from rllm_viewer.travel.inspect_messages import from_message, from_tool, to_message, to_tool
from rllm_viewer.travel.rllm_extra import KEY
from rllm_viewer.travel.selection import Picked

PER_TOKEN = ("logprobs", "prompt_media", "control_tokens", "token_rewards", "advantages")
HELD = ALL - TOKENS - {f"step.{name}" for name in PER_TOKEN} - {f"rollout.{name}" for name in MEASURES}
LOST_OF_STEP = (*PER_TOKEN, "prompt_ids", "completion_ids", *rllm_extra.PER_STEP.values())
STOPS = {"stop": "stop", "length": "max_tokens", "abort": "unknown"}
SAMPLE = ("id", "epoch", "input", "target", "messages", "output", "scores", "metadata", "events", "error")
POOLS = ("events_data", "attachments")
EVENT = ("event", "uuid", "timestamp", "working_start", "model", "role", "input", "input_refs", "tools", "output")
EVENT_REST = ("tool_choice", "config", "metadata")
LOG = ("version", "status", "eval", "samples", "results", "plan", "stats")
ATTACHMENT = "attachment://"


def rows(chosen: Iterable[Picked], source: Source, losses: Losses) -> Iterator[Row]:
    """Yields the log of all rollouts."""
    epochs: Counter[str] = Counter()
    samples = []
    for one in chosen:
        epochs[one.group.task.task_id] += 1
        samples.append(_sample(one, epochs[one.group.task.task_id], source, losses))
    yield {
        "version": 2,
        "status": "success",
        "eval": {
            "created": source.started,
            "task": str(source.tables.get("workflow", "")),
            "task_id": source.name,
            "run_id": source.name,
            "dataset": {"name": source.name, "samples": len(epochs)},
            "model": source.model,
            "config": {"epochs": max(epochs.values(), default=1)},
            "packages": {"rllm-core": __version__},
        },
        "samples": samples,
    }


def _sample(one: Picked, epoch: int, source: Source, losses: Losses) -> Row:
    episode, group = one.rollout.episode, one.group
    own = rllm_extra.about(one, None)
    own["rollout"] = {name: value for name, value in own["rollout"].items() if not name.startswith("has_")}
    own["trajectories"] = [changed(trajectory) for trajectory in episode.trajectories]
    pool: list[Row] = []
    events: list[Row] = []
    whole: list[Row] = []
    for number, trajectory in enumerate(episode.trajectories):
        for conversation in conversations_of(trajectory.steps, losses):
            whole = [to_message(message) for message in conversation.json_messages()]
            for at, position in zip(conversation.sampled, conversation.positions, strict=True):
                more = rllm_extra.about_step(one, number, position, "messages", "response", "tools", *LOST_OF_STEP)
                events.append(
                    {
                        "event": "model",
                        "timestamp": source.started,
                        "working_start": 0,
                        "model": source.model,
                        "role": trajectory.role,
                        "input": [],
                        "input_refs": [[len(pool), len(pool) + at]],
                        "tools": [to_tool(tool) for tool in conversation.tools],
                        "tool_choice": "auto",
                        "config": {},
                        "output": _output(trajectory.steps[position], whole[at], source),
                        "metadata": {KEY: _about_event(number, more, conversation.tools)},
                    }
                )
            pool += whole
    first = events[0]["input_refs"][0][1] if events else 0
    sample: Row = {
        "id": group.task.task_id,
        "epoch": epoch,
        "input": pool[:first],
        "target": _text(group.task.data.get("answer")),
        "messages": whole,
        "output": events[-1]["output"] if events else {"model": source.model},
        "scores": _scores(one),
        "metadata": {KEY: own},
        "events": events,
        "events_data": {"messages": pool, "calls": []},
    }
    if episode.error is not None:
        sample["error"] = {"message": episode.error, "traceback": "", "traceback_ansi": ""}
    return sample


def _about_event(number: int, more: Row, tools: Sequence[Any]) -> Row:
    found = {"trajectory": number, "step": more}
    exact = same_json([from_tool(to_tool(tool)) for tool in tools], list(tools))
    return found if exact else found | {"tools": list(tools)}


def _output(step: Step, answer: Row, source: Source) -> Row:
    prompt, completion = len(step.prompt_ids), len(step.completion_ids)
    return {
        "model": source.model,
        "choices": [{"message": answer, "stop_reason": STOPS[step.finish_reason.value]}],
        "usage": {"input_tokens": prompt, "output_tokens": completion, "total_tokens": prompt + completion},
    }


def _scores(one: Picked) -> Row:
    found: Row = {}
    if one.rollout.reward is not None:
        found["reward"] = {"value": one.rollout.reward}
    if one.rollout.episode.is_correct is not None:
        found["solved"] = {"value": "C" if one.rollout.episode.is_correct else "I"}
    return found


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read(located: Iterable[Located], losses: Losses) -> Iterator[Imported]:
    """Yields the trajectories of each sample, from its model events by role, or else from its messages."""
    for one in located:
        samples = one.row.get("samples")
        if not isinstance(samples, list) or not isinstance(one.row.get("eval"), dict):
            raise ConfigError(
                f"{one.where} is not an Inspect log with samples; convert .eval files with: "
                "inspect log convert --to json"
            )
        losses.unread("log", one.row, LOG)
        for position, sample in enumerate(samples):
            where = f"{one.where} sample {position + 1}"
            try:
                losses.unread("sample", sample, (*SAMPLE, *POOLS))
                yield from _read(_resolved(sample, sample.get("attachments") or {}), where, losses)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(f"{where} is not a valid sample: {type(error).__name__}: {error}") from error


def _read(sample: Mapping[str, Any], where: str, losses: Losses) -> Iterator[Imported]:
    metadata = sample.get("metadata") or {}
    own = metadata.get(KEY) or {}
    pool = (sample.get("events_data") or {}).get("messages") or []
    found: dict[Any, Imported] = {
        number: Imported(where, trajectory={"number": number, **fields})
        for number, fields in enumerate(own.get("trajectories") or ())
    }
    for event in sample.get("events") or ():
        if event.get("event") != "model":
            losses.add(f"event of kind {event.get('event')}")
            continue
        losses.unread("event", event, (*EVENT, *EVENT_REST))
        mine = (event.get("metadata") or {}).get(KEY) or {}
        key = mine.get("trajectory", event.get("role") or "agent")
        imported = found.setdefault(key, Imported(where, trajectory={"number": len(found), "role": str(key)}))
        if event["output"].get("choices"):
            imported.steps.append(_step(event, mine, pool, losses))
    if not found and sample.get("messages"):
        messages = [from_message(message) for message in sample["messages"]]
        found["agent"] = Imported(where, steps_from(messages, ()), trajectory={"number": 0})
    for imported in found.values() or [Imported(where)]:
        imported.together = str(sample["id"])
        imported.task = {
            "task_id": str(sample["id"]),
            "data": {"answer": sample["target"]} if sample.get("target") else {},
        }
        if own:
            rllm_extra.read_into(imported, own)
        else:
            losses.unread("sample.metadata", metadata, ())
            _theirs(imported, sample, losses)
        yield imported


def _step(event: Mapping[str, Any], mine: Mapping[str, Any], pool: Sequence[Any], losses: Losses) -> dict[str, Any]:
    refs = event.get("input_refs")
    asked = event.get("input") or [] if refs is None else [message for a, b in refs for message in pool[a:b]]
    [choice, *others] = event["output"]["choices"]
    losses.add("event.output.choices (beyond the first)", len(others))
    losses.add("event.output.logprobs (without token ids)", choice.get("logprobs") is not None)
    return {
        "messages": [from_message(message) for message in asked],
        "response": from_message(choice["message"]),
        "tools": mine.get("tools") or [from_tool(tool) for tool in event.get("tools") or ()],
        "prompt_ids": [],
        "completion_ids": [],
        "finish_reason": "length" if choice.get("stop_reason") in ("max_tokens", "model_length") else "stop",
        **mine.get("step", {}),
    }


def _theirs(imported: Imported, sample: Mapping[str, Any], losses: Losses) -> None:
    """Reads a third-party sample: its first score becomes the reward, and its other numbers become metrics."""
    imported.rollout["rollout_index"] = max(0, int(sample.get("epoch", 1)) - 1)
    if sample.get("error"):
        imported.rollout |= {"termination_reason": "error", "error": str(sample["error"].get("message"))}
    metrics = {}
    for name, score in (sample.get("scores") or {}).items():
        value = (
            {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}.get(score["value"])
            if isinstance(score["value"], str)
            else score["value"]
        )
        if not isinstance(value, bool | int | float):
            losses.add("score (not a number)")
        elif "reward" not in imported.trajectory:
            imported.trajectory["reward"] = float(value)
            if score["value"] in ("C", "I", True, False):
                imported.rollout["is_correct"] = bool(value)
        else:
            metrics[name] = float(value)
    if metrics:
        imported.rollout["metrics"] = metrics


def _resolved(value: Any, attachments: Mapping[str, str]) -> Any:
    """Replaces references to attachments by their texts."""
    if isinstance(value, str) and value.startswith(ATTACHMENT):
        return attachments.get(value.removeprefix(ATTACHMENT), value)
    if isinstance(value, dict):
        return {key: _resolved(part, attachments) for key, part in value.items()}
    return [_resolved(part, attachments) for part in value] if isinstance(value, list) else value


FORMAT = Format("inspect", "an evaluation log of Inspect", HELD, (".json",), rows, read)
