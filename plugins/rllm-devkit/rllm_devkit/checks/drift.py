"""Measures how often a conversation's next prompt does not start with its earlier tokens.

It compares a session with prompts that are rendered again from the messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rllm_core.parser import BaseParser
from rllm_core.types import MessageLike, TokenIds, starts_with, token_ids
from rllm_devkit.checks.completions import QUESTION, Completions, tail

Draw = Callable[[Completions], list[int] | None]
"""Draws a completion; returns None if the parser supports none of this kind."""


@dataclass
class Drift:
    """Counts of lost turns for one kind of completion.

    Attributes:
        completions: Kind of completion.
        turns: Turns followed by another turn.
        completion_tokens: Tokens sampled in all turns, including the last.
        lost: Turns whose tokens the session could not continue, so the next prompt starts a new segment.
        lost_rerendered: Turns whose tokens changed when each prompt was rendered from the parsed messages.
        reasons: Reasons for segment breaks and errors.
    """

    completions: str
    turns: int = 0
    completion_tokens: int = 0
    lost: int = 0
    lost_rerendered: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def _split(completions: Completions) -> list[int] | None:
    return completions.split(completions.text(), pieces=2)


def _noise(completions: Completions) -> list[int] | None:
    return completions.enclosed(completions.noise(completions.rng.randint(8, 40)))


KINDS: Mapping[str, Draw] = {
    "text": Completions.text,
    "text in other tokens": _split,
    "random tokens": _noise,
    "white space at the edges": Completions.with_edges,
    "reasoning": Completions.reasoning,
    "tool call": Completions.tool_call,
    "tool call, compact JSON": lambda c: c.respaced_tool_call(separators=(",", ":"), ensure_ascii=False),
    "tool call, indented JSON": lambda c: c.respaced_tool_call(indent=2, ensure_ascii=False),
    "tool call, escaped JSON": lambda c: c.respaced_tool_call(),
    "cut off": Completions.cut_off,
}


def probe_drift(
    parser: BaseParser,
    *,
    kinds: Mapping[str, Draw] = KINDS,
    seed: int = 0,
    conversations: int = 4,
    turns: int = 4,
) -> list[Drift]:
    """Runs conversations with a session and compares every prompt with the earlier tokens.

    Args:
        parser: Parser to measure.
        kinds: Kinds of completions; kinds the parser does not support are left out.
        seed: Seed; equal seeds give equal conversations.
        conversations: Conversations per kind.
        turns: Turns per conversation, not counting the last.
    """
    found = []
    for name, draw in kinds.items():
        completions, drift = Completions(parser, seed), Drift(name)
        for _ in range(conversations):
            _play(completions, draw, turns, drift)
        if drift.turns:
            found.append(drift)
    return found


@dataclass(frozen=True)
class _Sampled:
    """Tokens of a conversation so far, from the session and rendered from the messages."""

    session: TokenIds
    rerendered: TokenIds | None


def _play(completions: Completions, draw: Draw, turns: int, drift: Drift) -> None:
    parser, tools = completions.parser, completions.tools
    session = parser.session(tools=tools)
    conversation: list[MessageLike] = [QUESTION]
    before: _Sampled | None = None
    for _ in range(turns + 1):
        rendered = _rendered(parser, conversation, tools, drift)
        if before is not None:
            drift.turns += 1
            drift.lost_rerendered += not _continues(rendered, before.rerendered)
        try:
            turn = session.next_prompt(conversation, tools=tools)
        except Exception as error:  # a template may reject model output; counted in reasons
            drift.lost += 1
            drift.reasons[_first_line(error)] += 1
            return
        if before is not None:
            drift.lost += turn.break_reason is not None or not _continues(turn.prompt_ids, before.session)
            if turn.break_reason is not None:
                drift.reasons[turn.break_reason.value] += 1
        sampled = draw(completions)
        if sampled is None:
            return
        completion = token_ids(sampled)
        drift.completion_tokens += len(completion)
        session.record(completion)
        before = _Sampled(
            np.concatenate([turn.prompt_ids, completion]),
            None if rendered is None else np.concatenate([rendered, completion]),
        )
        calls = session.answer.get("tool_calls") or ()
        kind = ", ".join(["tool"] * len(calls)) or "user"
        conversation += [session.answer, *tail(kind, calls)]


def _rendered(
    parser: BaseParser, conversation: Sequence[MessageLike], tools: Sequence[Any] | None, drift: Drift
) -> TokenIds | None:
    try:
        return token_ids(parser.render(conversation, tools=tools))
    except Exception as error:  # as above: without a rendering, the turn is lost
        drift.reasons[f"rendered again: {_first_line(error)}"] += 1
        return None


def _continues(prompt: TokenIds | None, before: TokenIds | None) -> bool:
    return prompt is not None and before is not None and starts_with(prompt, before)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
