"""Habits of agents that split conversations into many segments, which makes training slower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm_viewer.diagnosis.answers import AnswerCounts
from rllm_viewer.diagnosis.causes import Cause

CALLS, ROOTS = "workflow/gateway_calls", "workflow/gateway_roots"  # metrics of package rllm-gateway
BREAKS = "segment_breaks/"
FEW_ROOTS = 2.0  # such as a task and a title
MANY_ROOTS = 0.5  # share of the calls
MANY_BREAKS = 0.25  # share of the calls

Row = Mapping[str, Any]

CURES = {
    "tools_changed": "the agent offers different tools in some calls: let it offer the same ones in every call",
    "assistant_inserted": "the agent adds answers that the model did not give: let it add user messages instead",
    "bridge_none": "the parser cannot append the agent's messages to an answer: let it add one user message after tool "
    "results, or use another parser",
    "tokens_after_stop": "the engine returns tokens after the stop token",
}


def calls_start_over(row: Row, tables: Mapping[str, Any], first: list[Row]) -> bool:
    """Returns whether most calls of agents start a new conversation."""
    roots = row.get(ROOTS, 0.0)
    return bool(roots > FEW_ROOTS and roots > MANY_ROOTS * row.get(CALLS, 0.0))


def why_calls_start_over(answers: AnswerCounts, means: Row) -> Cause | None:
    """Distinguishes agents that rewrite their history from agents that ask single questions."""
    if answers.repeats_history:
        seen = f"{answers.with_history} of {answers.conversations} recorded ones start with reworded answers"
        cure = (
            "the agent rewrites its history: let it keep its messages and append to them, see docs/agents/exactness.md"
        )
        return Cause((cure,), seen=seen)
    if answers.conversations:
        causes = (
            "the agent replaces its history with a summary: let it do so rarely",
            "it asks single questions or has sub-agents, which is fine",
        )
        return Cause(causes)
    return None


def segments_break(row: Row, tables: Mapping[str, Any], first: list[Row]) -> bool:
    """Returns whether many calls of agents start a new segment of their conversation."""
    calls = row.get("turns_mean", 0.0) * row.get("trajectories", 0.0)
    return CALLS in row and bool(row.get("segment_breaks", 0.0) > MANY_BREAKS * calls)


def why_segments_break(answers: AnswerCounts, means: Row) -> Cause | None:
    """Returns a frequent reason for the breaks, with its remedy."""
    reasons = {name.removeprefix(BREAKS): mean for name, mean in means.items() if name.startswith(BREAKS)}
    if not reasons:
        return None
    reason = max(reasons, key=lambda name: reasons[name])
    cure = CURES.get(reason, "see docs/agents/exactness.md")
    return Cause((cure,), seen=f"often with reason {reason}")
