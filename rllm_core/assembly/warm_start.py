"""Conversations from a workflow for a model made from scratch, checked as they are generated."""

from __future__ import annotations

import random
from collections.abc import Iterator

from rllm_core.assembly.tasks import blaming
from rllm_core.backend import WarmStart
from rllm_core.errors import PluginError
from rllm_core.text import counted
from rllm_core.workflow import Conversation, Workflow


def warm_start_of(workflow: Workflow, name: str) -> WarmStart:
    """Returns `Workflow.warm_start`, wrapped so that its errors are one line each."""

    def conversations(rng: random.Random) -> Iterator[Conversation] | None:
        with blaming(name, "warm_start()"):
            found = workflow.warm_start(rng)
        return None if found is None else _checked(found, name)

    return conversations


def _checked(found: Iterator[Conversation], name: str) -> Iterator[Conversation]:
    made = 0
    with blaming(name, "warm_start()"):
        for conversation in found:
            if not _is_conversation(conversation):
                raise PluginError(
                    f"workflow {name!r}: warm_start() yielded {conversation!r:.80}; yield lists of messages such as "
                    "{'role': 'user', 'content': '...'}, at least one of them from the assistant"
                )
            made += 1
            yield conversation
    ended = f"warm_start() ended after {counted(made, 'conversation')}"
    raise PluginError(f"workflow {name!r}: {ended}; yield them endlessly")


def _is_conversation(found: object) -> bool:
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        return False
    return any(message.get("role") == "assistant" for message in found)
