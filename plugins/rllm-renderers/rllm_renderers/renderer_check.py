"""What a renderer of the package can do, found out by rendering short conversations with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rllm_renderers.encoding import Encoder
from rllm_renderers.package import Family
from rllm_renderers.self_check import TAILS, Tail

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a key up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
_ASK = {"role": "user", "content": "What is it now?"}
_SAYS, _SEEKS = "Let me see", "the lost key"
# What families raise on conversations they do not take.
_REFUSALS = (TypeError, ValueError, LookupError, AttributeError)

Messages = list[dict[str, Any]]


def shows_tools(family: Family) -> bool:
    """Whether the family prints the tools it is given."""
    offered = _rendered(family, [_ASK], [_TOOL])
    return offered is not None and offered != _rendered(family, [_ASK], None)


def bridged_tails(family: Family, encoder: Encoder, stops: Sequence[int], with_tools: bool) -> frozenset[Tail]:
    """The tails after which bridging equals, token for token, rendering a whole conversation."""
    proven = set()
    for tools in [None, [_TOOL]] if with_tools else [None]:
        for tail in TAILS:
            kind = Tail.of(tail, tools)
            named = [{**message, "name": "look_up"} if message["role"] == "tool" else message for message in tail]
            # Without its name, a tool's answer may be refused; it must not be rendered in another way.
            agrees = [_is_exact(family, encoder, stops, messages, tools) for messages in (named, tail)]
            if kind is not None and agrees[0] and agrees[1] is not False:
                proven.add(kind)
    return frozenset(proven)


def _is_exact(
    family: Family, encoder: Encoder, stops: Sequence[int], tail: Messages, tools: Messages | None
) -> bool | None:
    """Whether a bridge and a rendering agree on what follows the answer's stop token; None if there is no bridge."""
    asked = _rendered(family, [_ASK], tools, add_generation_prompt=False)
    agreements: list[bool] = []
    for answer in _answers(tail):
        whole = _rendered(family, [_ASK, answer, *tail], tools)
        sample = _sample(family, encoder, stops, answer, tools)
        if asked is None or whole is None or sample is None:
            continue
        # Where later messages change what stands before the answer, a bridge could not know it.
        if whole[: len(asked)] != asked:
            return False
        prompt, said = sample
        bridges = [
            (stop, extended.token_ids[len(prompt) + len(said) + 1 :])
            for stop in stops
            if (extended := family.bridge_to_next_turn(list(prompt), [*said, stop], tail, tools=tools)) is not None
        ]
        if bridges:
            agreements.append(any(_follows(encoder, stops, whole, answer, *bridge) for bridge in bridges))
    return all(agreements) if agreements else None


def _answers(tail: Messages) -> Iterator[dict[str, Any]]:
    """The assistant's message before ``tail``, without and with reasoning, and without text if there are calls."""
    answer: dict[str, Any] = {"role": "assistant", "content": _SAYS}
    calls = [
        {"id": m["tool_call_id"], "type": "function", "function": {"name": "look_up", "arguments": {"key": _SEEKS}}}
        for m in tail
        if m["role"] == "tool"
    ]
    if calls:
        answer["tool_calls"] = calls
        yield {**answer, "content": ""}
    yield answer
    yield {**answer, "reasoning_content": "There may be more."}


def _sample(
    family: Family, encoder: Encoder, stops: Sequence[int], answer: dict[str, Any], tools: Messages | None
) -> tuple[list[int], list[int]] | None:
    """A prompt, and how a model would give ``answer`` to it, without the stop token."""
    prompt = _rendered(family, [_ASK], tools)
    turn = _rendered(family, [_ASK, answer], tools, add_generation_prompt=False)
    if prompt is None or turn is None:
        return None
    before, after = encoder.decode(prompt), encoder.decode(turn)
    if after.startswith(before):
        said = encoder.encode(after[len(before) :])
    elif answer["content"] and answer["content"] in after:
        # The prompt opens reasoning that the family leaves out of answers that have been given.
        said = encoder.encode("There may be more.\n</think>\n\n" + after[after.rindex(answer["content"]) :])
    else:
        return None
    end = next((position for position, token in enumerate(said) if token in stops), len(said))
    return prompt, said[:end]


def _follows(
    encoder: Encoder, stops: Sequence[int], whole: list[int], answer: dict[str, Any], stop: int, suffix: list[int]
) -> bool:
    """Whether ``whole`` is a history that ends with the answer, its stop token, and ``suffix``."""
    ending = [stop, *suffix]
    history = encoder.decode(whole[: -len(ending)])
    _, found, after = history.rpartition(_SEEKS if "tool_calls" in answer else _SAYS)
    return whole[-len(ending) :] == ending and bool(found) and set(stops).isdisjoint(encoder.encode(after))


def _rendered(
    family: Family, messages: Messages, tools: Messages | None, *, add_generation_prompt: bool = True
) -> list[int] | None:
    try:
        return family.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)
    except _REFUSALS:
        return None
