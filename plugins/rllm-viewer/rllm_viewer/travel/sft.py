"""``sft``: rows for supervised fine-tuning, with exact tokens and a mask of the sampled ones.

The columns ``messages``, ``tools``, ``input_ids`` and ``assistant_masks`` follow TRL. A row is one unbroken token
sequence, so each sampled token is in the mask of exactly one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from rllm_core.errors import ConfigError
from rllm_viewer.travel import columns
from rllm_viewer.travel.contract import Format, Imported, Located, Row, Source
from rllm_viewer.travel.conversations import StepConversation, conversations_of, steps_from, with_weights
from rllm_viewer.travel.fields import TEXT, TOKENS, Losses
from rllm_viewer.travel.selection import Picked

IDS, MASK = "input_ids", "assistant_masks"
HELD = columns.HOLDS | TEXT | TOKENS
KNOWN = (*columns.NAMES, "id", "messages", "tools", IDS, MASK, "question", "answer", "weight")


def rows(chosen: Iterable[Picked], _: Source, losses: Losses) -> Iterator[Row]:
    """Yields one row per conversation of a trained trajectory."""
    for one in chosen:
        for number, trajectory in columns.trained(one, losses):
            for part, conversation in enumerate(conversations_of(trajectory.steps, losses)):
                messages = with_weights(conversation)
                before = messages[: conversation.sampled[0]]
                episode = one.rollout.episode
                row: Row = {
                    "id": f"{episode.rollout_id or one.group.task.task_id}/{number}/{part}",
                    "messages": messages,
                    "tools": conversation.tools,
                    **_tokens(conversation, losses),
                    **columns.question(before, conversation.steps[-1], one.group.task.data),
                    **columns.of_rollout(one, number, trajectory),
                }
                yield {name: value for name, value in row.items() if value is not None}


def _tokens(conversation: StepConversation, losses: Losses) -> Row:
    last = conversation.steps[-1]
    if not len(last.prompt_ids) or any(not len(step.completion_ids) for step in conversation.steps):
        return {}
    if last.prompt_media:
        losses.add("step.prompt_ids (of conversations with images)", len(conversation.steps))
        return {}
    ids = np.concatenate((last.prompt_ids, last.completion_ids))
    mask = np.zeros(len(ids), np.int8)
    for step in conversation.steps:
        start = len(step.prompt_ids)
        mask[start : start + len(step.completion_ids)] = 1
    return {IDS: ids.tolist(), MASK: mask.tolist()}


def read(located: Iterable[Located], losses: Losses) -> Iterator[Imported]:
    """Yields the steps of each row; the tokens in its mask are their completions."""
    for one in located:
        losses.unread("row", one.row, KNOWN)
        losses.add("row.weight", one.row.get("weight", 1) != 1)
        messages = columns.messages_of(one, "messages")
        imported = Imported(one.where, steps_from(messages, columns.json_column(one, "tools", list)))
        if one.row.get(IDS):
            _add_tokens(one, imported.steps, losses)
        columns.read_into(imported, one)
        yield imported


def _add_tokens(one: Located, steps: list[dict[str, Any]], losses: Losses) -> None:
    ids, mask = one.row[IDS], one.row.get(MASK)
    if not isinstance(mask, list) or not isinstance(ids, list) or len(mask) != len(ids) or not set(mask) <= {0, 1}:
        raise ConfigError(f"{one.where}: {MASK} must have a 0 or a 1 for each of its {IDS}")
    padded = np.array([0, *mask, 0])
    ends = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    spans = list(pairwise(ends))[::2]
    if len(spans) != len(steps):  # then no span can be assigned to a step
        losses.add("row.input_ids (whose mask has another number of answers)")
        return
    for step, (start, stop) in zip(steps, spans, strict=True):
        step |= {"prompt_ids": ids[:start], "completion_ids": ids[start:stop]}


FORMAT = Format(
    "sft",
    "supervised fine-tuning with exact tokens (workflow sft, TRL)",
    HELD,
    (".jsonl", ".parquet"),
    rows,
    read,
    is_dataset=True,
    as_text=("messages", "tools"),
)
