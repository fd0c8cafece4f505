"""Steps of a trajectory as differences: the part that each step adds to the step before.

Written and pickled trajectories store these differences, so their size also grows linearly with the turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rllm_core.messages import Messages, identical
from rllm_core.records import Record
from rllm_core.tokens import TokenLog

_Log = TypeVar("_Log", TokenLog, Messages)


def differences(steps: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yields the fields ``prompt_ids``, ``messages`` and ``tools`` of each step as differences from the step before.

    A difference is ``{"continues": True, "new": ...}``. Fields that do not continue the previous step are left out.
    """
    before: Any = None
    for step in steps:
        new = {}
        if before is not None:
            if step.continues(before):
                new["prompt_ids"] = step.prompt_ids[len(before.prompt_ids) + len(before.completion_ids) :]
            known = len(before.messages)
            if identical(step.messages[:known], before.messages[:]):
                new["messages"] = step.messages[known:]
            if step.tools and identical(step.tools, before.tools):
                new["tools"] = []
        yield {name: {"continues": True, "new": value} for name, value in new.items()}
        before = step


def restored(steps: Sequence[Any]) -> list[Any]:
    """Inverts `differences`: returns full prompts and conversations, which share storage. Validates nothing else."""
    complete: list[Any] = []
    read: list[tuple[dict[str, Any], TokenLog, int, int]] = []
    tokens: TokenLog | None = None
    messages: Messages | None = None
    tools: Any = None
    for written in steps:
        step: Any = dict(written) if isinstance(written, dict) else written
        fields = step if isinstance(step, dict) else step.__dict__ if isinstance(step, Record) else {}
        if "prompt_ids" in fields and "completion_ids" in fields:
            tokens = _continued(tokens, fields["prompt_ids"], TokenLog)
            cut = len(tokens)
            tokens.extend(fields["completion_ids"])
            if isinstance(step, dict):
                read.append((step, tokens, cut, len(tokens)))
        else:
            tokens = None
        messages = _continued(messages, fields.get("messages", ()), Messages)
        tools = _same_tools(tools, fields.get("tools", ()))
        if isinstance(step, dict):
            step["messages"] = messages.view()
            step["tools"] = tools
        complete.append(step)
    for step, log, cut, end in read:  # only now that the logs are complete: earlier views would keep old buffers alive
        step.update(prompt_ids=log.view(0, cut), completion_ids=log.view(cut, end))
    return complete


def _same_tools(before: Any, written: Any) -> Any:
    if not isinstance(written, Mapping):
        return written
    if before is None or dict(written) != {"continues": True, "new": []}:
        raise ValueError('tools that are those of the step before must be written as {"continues": true, "new": []}')
    return before


def _continued(log: _Log | None, written: Any, kind: type[_Log]) -> _Log:
    """Extends ``log`` by a difference, or starts a new log."""
    if not isinstance(written, Mapping):
        return kind(written)
    if set(written) != {"continues", "new"} or written["continues"] is not True:
        raise ValueError('a step that continues another must be written as {"continues": true, "new": [...]}')
    if log is None:
        raise ValueError("a step that continues another needs a complete step before it")
    log.extend(written["new"])
    return log
