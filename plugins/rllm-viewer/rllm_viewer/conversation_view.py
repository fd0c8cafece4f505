"""The conversations of recorded rollouts as blocks of text; each model call shows only its new messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from rllm_core.text import counted
from rllm_core.types import FinishReason, Step, Trajectory
from rllm_viewer.terminal import cut, labeled, number, spread, value_text

SHOWN_CHARACTERS = 600
SHOWN_CALLS = 6
NOT_CONTENT = ("role", "content", "tool_calls", "tool_call_id")

Messages = Sequence[Mapping[str, Any]]


def opening_of(trajectory: Trajectory) -> list[Mapping[str, Any]]:
    """Returns the messages before the first model call."""
    return list(trajectory.steps[0].messages) if trajectory.steps else []


def messages(shown: Messages, *, whole: bool) -> Iterator[RenderableType]:
    """Yields a block for each message, tool call and tool result.

    Args:
        shown: Messages in order.
        whole: Whether to show long texts in full.
    """
    for message in shown:
        role = str(message.get("role", "message"))
        for name, value in message.items():
            if name not in NOT_CONTENT and value:
                yield labeled(role, f"{name}: {_cut(value_text(value), whole)}", style="dim")
        content = _content(message.get("content"))
        calls = message.get("tool_calls") or ()
        if content or not calls:
            yield labeled(role, _cut(content, whole) if content else '""')
        for call in calls:
            yield labeled("call", _cut(_call(call), whole))


def response(step: Step, texts: Callable[[], Mapping[int, str]], *, whole: bool) -> Iterator[RenderableType]:
    """Yields the response of a model call; if the parser found nothing in it, the decoded tokens."""
    if any(value for name, value in step.response.items() if name != "role"):
        yield from messages([step.response], whole=whole)
        return
    spelled = "".join(texts().get(token, "") for token in step.completion_ids.tolist())
    yield labeled("sampled", _cut(spelled, whole) or f"{counted(len(step.completion_ids), 'token')} without text")


def calls(
    trajectory: Trajectory,
    advantages: Sequence[Any],
    opening: Messages | None,
    texts: Callable[[], Mapping[int, str]],
    *,
    whole: bool,
) -> Iterator[RenderableType]:
    """Yields blocks for the model calls of a trajectory.

    Args:
        trajectory: Trajectory to show.
        advantages: Advantages of each step; empty if it was not trained.
        opening: Messages before the first call that were already shown, or None.
        texts: Returns the texts of tokens, needed only for a response without content.
        whole: Whether to show long texts, and all calls of a long trajectory.
    """
    steps = trajectory.steps
    known: list[Mapping[str, Any]] = list(opening or ())
    left_out = (
        set() if whole or len(steps) <= SHOWN_CALLS else set(range(SHOWN_CALLS // 2, len(steps) - SHOWN_CALLS // 2))
    )
    for position, step in enumerate(steps):
        before = list(step.messages)
        if position not in left_out:
            if before[: len(known)] != known:
                yield labeled("edited", "the messages before this call differ from those above", style="dim")
                known = common(known, before)
            yield from messages(before[len(known) :], whole=whole)
            yield from _facts(step, position, len(steps), advantages)
            yield from response(step, texts, whole=whole)
        elif position == min(left_out):
            yield labeled("...", f"{len(left_out)} model calls left out (--rollout shows all)", style="dim")
        known = [*before, step.response]


def common(known: Messages, now: Messages) -> list[Mapping[str, Any]]:
    """Returns the messages that both lists start with."""
    same = 0
    while same < min(len(known), len(now)) and known[same] == now[same]:
        same += 1
    return list(known[:same])


def _facts(step: Step, position: int, steps: int, advantages: Sequence[Any]) -> Iterator[RenderableType]:
    """Yields the unusual facts about a model call, before its response."""
    if step.break_reason is not None:
        text = f"{step.break_reason}: segment {step.segment} starts, which does not continue the tokens before it"
        yield labeled("break", text, style="yellow")
    for media in step.prompt_media:
        yield labeled(
            media.kind, f"{media.length_tokens} tokens; the run folder does not have its content", style="dim"
        )
    facts = []
    if steps > 1:
        facts.append(f"call {position + 1}")
        if position < len(advantages) and advantages[position] is not None:
            facts.append(f"advantage {spread(advantages[position])}")
        if step.reward is not None:
            facts.append(f"reward {number(step.reward)}")
        if step.weight_version is not None:
            facts.append(f"version {step.weight_version}")
    if step.token_rewards is not None:
        facts.append(f"token rewards sum to {number(float(step.token_rewards.sum()))}")
    if step.finish_reason is FinishReason.LENGTH:
        facts.append(f"truncated after {counted(len(step.completion_ids), 'token')}")
    if step.control_tokens:
        facts.append(f"new text spells {counted(step.control_tokens, 'control token')}")
    if facts:
        yield labeled("", ", ".join(facts), style="dim")


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(
            part["text"] if isinstance(part.get("text"), str) else f"[{part.get('type', 'part')}]"
            for part in content
            if isinstance(part, dict)
        )
    return "" if content is None else value_text(content)


def _call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else {}
    return f"{function.get('name', '?')}({value_text(function.get('arguments', ''))})"


def _cut(text: str, whole: bool) -> str:
    return text if whole else cut(text, SHOWN_CHARACTERS)
