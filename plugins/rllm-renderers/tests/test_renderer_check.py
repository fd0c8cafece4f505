"""The check at construction, on a small family of our own that is right or wrong in known ways."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rllm_renderers.renderer_check import bridged_tails, shows_tools
from rllm_renderers.self_check import Tail

EVERY_TAIL = {
    Tail(answers, user, tools)
    for answers, user in ((0, True), (1, False), (1, True), (2, False), (2, True))
    for tools in (False, True)
}
WITHOUT_ANSWERS = {tail for tail in EVERY_TAIL if not tail.answers}


class Family:
    """ChatML; subclasses differ in one place."""

    opening = "<|im_start|>assistant\n"

    def __init__(self, encoder):
        self.encoder = encoder
        [self.stop] = encoder.encode("<|im_end|>")

    def head(self, messages, tools):
        return "tools<|im_end|>" if tools else ""

    def text(self, messages, before):
        return "".join(f"<|im_start|>{m['role']}\n{self.body(m, before)}<|im_end|>\n" for m in messages)

    def body(self, message, before):
        return message["content"] + "".join(str(call["function"]) for call in message.get("tool_calls", ()))

    def render_ids(self, messages, *, tools, add_generation_prompt):
        opening = self.opening if add_generation_prompt else ""
        return self.encoder.encode(self.head(messages, tools) + self.text(messages, messages) + opening)

    def suffix(self, messages):
        return "\n" + self.text(messages, []) + self.opening

    def bridge_to_next_turn(self, prompt, completion, messages, *, tools):
        return SimpleNamespace(token_ids=[*prompt, *completion, *self.encoder.encode(self.suffix(messages))])


class LeavesOutANewline(Family):
    def suffix(self, messages):
        return super().suffix(messages)[1:]


class WritesAnotherText(Family):
    def suffix(self, messages):
        return super().suffix(messages).replace("e", "a")


class KeepsOnlyTheLastMessage(Family):
    def suffix(self, messages):
        return super().suffix(messages[-1:])


class CountsMessages(Family):
    def head(self, messages, tools):
        return str(len(messages)) + super().head(messages, tools)


class NamesToolsAfterTheirCalls(Family):
    """With its name, an answer is the same in both; without, only the whole conversation knows it."""

    def body(self, message, before):
        names = {c["id"]: c["function"]["name"] for m in before for c in m.get("tool_calls", ())}
        name = message.get("name") or names.get(message.get("tool_call_id"), "?")
        return (name if message["role"] == "tool" else "") + super().body(message, before)


class AsksForNames(NamesToolsAfterTheirCalls):
    """Like it, but refuses what it cannot know."""

    def bridge_to_next_turn(self, prompt, completion, messages, *, tools):
        if any(m["role"] == "tool" and "name" not in m for m in messages):
            return None
        return super().bridge_to_next_turn(prompt, completion, messages, tools=tools)


class NeverBridges(Family):
    def bridge_to_next_turn(self, prompt, completion, messages, *, tools):
        return None


class RefusesTools(Family):
    def text(self, messages, before):
        if any(m["role"] == "tool" for m in messages):
            raise ValueError("no tools here")
        return super().text(messages, before)


class ShowsNoTools(Family):
    def head(self, messages, tools):
        return ""


@pytest.mark.parametrize(
    ("kind", "tails"),
    [
        (Family, EVERY_TAIL),
        (LeavesOutANewline, set()),
        (WritesAnotherText, set()),
        (KeepsOnlyTheLastMessage, {tail for tail in EVERY_TAIL if tail.answers + tail.user == 1}),
        (CountsMessages, set()),
        (NamesToolsAfterTheirCalls, WITHOUT_ANSWERS),
        (AsksForNames, EVERY_TAIL),
        (NeverBridges, set()),
        (RefusesTools, WITHOUT_ANSWERS),
        (ShowsNoTools, {tail for tail in EVERY_TAIL if not tail.tools}),
    ],
)
def test_only_exact_bridges_are_proven(renderer, kind, tails):
    family = kind(renderer.encoder)
    assert shows_tools(family) is (kind is not ShowsNoTools)
    assert bridged_tails(family, renderer.encoder, [family.stop], shows_tools(family)) == tails
