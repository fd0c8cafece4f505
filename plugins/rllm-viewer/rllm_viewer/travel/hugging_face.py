"""``hf``: conversational prompt-completion rows of TRL and Hugging Face datasets, one per model call.

TRL trains the completion only, so each row trains the tokens of one call. ``tools`` is JSON text, which TRL reads,
because a dataset column has one type for all rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from rllm_core.errors import ConfigError
from rllm_core.types import thaw
from rllm_viewer.travel import columns
from rllm_viewer.travel.contract import Format, Imported, Located, Row, Source
from rllm_viewer.travel.conversations import steps_from
from rllm_viewer.travel.fields import TEXT, Losses, json_of
from rllm_viewer.travel.selection import Picked

STEP_COLUMNS = {
    "finish_reason": "finish_reason",
    "weight_version": "weight_version",
    "segment": "segment",
    "break_reason": "break_reason",
    "turn_reward": "reward",
}
"""Columns of a row, each with the field of the step that it holds."""

HELD = columns.HOLDS | TEXT | {f"step.{name}" for name in STEP_COLUMNS.values()}
KNOWN = (*columns.NAMES, *STEP_COLUMNS, "prompt", "completion", "tools", "turn")


def rows(chosen: Iterable[Picked], _: Source, losses: Losses) -> Iterator[Row]:
    """Yields one row per model call of a trained trajectory."""
    for one in chosen:
        for number, trajectory in columns.trained(one, losses):
            for turn, step in enumerate(trajectory.steps):
                row: Row = {
                    "prompt": [thaw(message) for message in step.messages],
                    "completion": [thaw(step.response)],
                    "tools": json.dumps(thaw(step.tools), ensure_ascii=False) if step.tools else None,
                    "turn": turn,
                    **{column: json_of(getattr(step, name)) for column, name in STEP_COLUMNS.items()},
                    **columns.of_rollout(one, number, trajectory),
                }
                yield {name: value for name, value in row.items() if value is not None}


def read(located: Iterable[Located], losses: Losses) -> Iterator[Imported]:
    """Yields the step of each row; a conversation in ``messages`` has one step per answer."""
    for one in located:
        losses.unread("row", one.row, (*KNOWN, *(("messages",) if "prompt" not in one.row else ())))
        tools = columns.json_column(one, "tools", list)
        steps = _of_messages(one, tools) if "prompt" not in one.row else _of_prompt(one, tools, losses)
        for step in steps:
            step |= {name: one.row[column] for column, name in STEP_COLUMNS.items() if one.row.get(column) is not None}
        imported = Imported(one.where, steps)
        columns.read_into(imported, one)
        yield imported


def _of_prompt(one: Located, tools: list[Any], losses: Losses) -> list[dict[str, Any]]:
    if isinstance(one.row["prompt"], str):
        prompt: list[dict[str, Any]] = [{"role": "user", "content": one.row["prompt"]}]
        completion: list[dict[str, Any]] = [{"role": "assistant", "content": str(one.row.get("completion", ""))}]
    else:
        prompt, completion = columns.messages_of(one, "prompt"), columns.messages_of(one, "completion")
    answers = [at for at, message in enumerate(completion, len(prompt)) if message["role"] == "assistant"]
    if not answers:
        raise ConfigError(f"{one.where}: completion has no assistant message")
    losses.add("message (of a completion, after its last answer)", len(prompt) + len(completion) - 1 - answers[-1])
    return steps_from([*prompt, *completion], tools, answers)


def _of_messages(one: Located, tools: list[Any]) -> list[dict[str, Any]]:
    return steps_from(columns.messages_of(one, "messages"), tools)


FORMAT = Format(
    "hf",
    "Hugging Face datasets and TRL: prompt, completion and tools",
    HELD,
    (".jsonl", ".parquet"),
    rows,
    read,
    is_dataset=True,
)
