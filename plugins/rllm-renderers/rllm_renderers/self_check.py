"""What a chat template can do, found out by rendering short conversations with it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, Self

from rllm_core.parser import ToolSpec
from rllm_core.types import MessageLike
from rllm_renderers.formats import FORMATS, NoCalls, ToolFormat, schemas_of
from rllm_renderers.media import has_media
from rllm_renderers.template import ChatTemplate, Suffix, made_up_call


class Tail(NamedTuple):
    """A kind of continuation after an assistant's message: ``[tool*, user?]``.

    Attributes:
        answers: How many tools answer; 2 stands for two or more.
        user: Whether a user's message follows.
        tools: Whether tools are offered.
        images: The roles whose messages hold images.
    """

    answers: int
    user: bool
    tools: bool
    images: frozenset[str] = frozenset()

    @classmethod
    def of(cls, new_messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None) -> Self | None:
        """The kind of ``new_messages``; None if it is none of these."""
        roles = [message.get("role") for message in new_messages]
        answers = roles.count("tool")
        if not roles or roles[answers:] not in ([], ["user"]):
            return None
        images = frozenset(str(message.get("role")) for message in new_messages if has_media([message]))
        return cls(min(answers, 2), len(roles) > answers, bool(tools), images)


_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a key up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["key"],
        },
    },
}
_NAME, _ARGUMENTS = "look_up", {"key": "of the door", "limit": 3}
_QUESTION = {"role": "user", "content": "What is it now?"}
_ANSWER = "Let me see"
_NEXT = {"role": "user", "content": "Go on, please!"}
_FIRST = {"role": "tool", "tool_call_id": "call00001", "content": "12 of them"}
_SECOND = {"role": "tool", "tool_call_id": "call00002", "content": "none"}
TAILS = ([_NEXT], [_FIRST], [_FIRST, _NEXT], [_FIRST, _SECOND], [_FIRST, _SECOND, _NEXT])


def shows_tools(template: ChatTemplate) -> bool:
    """Whether the template prints the tools it is given."""
    offered = template.rendered_or_none([_QUESTION], [_TOOL])
    return offered is not None and offered != template.rendered_or_none([_QUESTION])


def tool_format(template: ChatTemplate) -> ToolFormat:
    """The format of tool calls that the template writes.

    Found by rendering a made-up call and reading it back; where the template writes none, by the marks that stand in
    its text. `NoCalls` if neither tells, or if calls are written in a way that is not known here.
    """
    writes_calls = False
    for answer, prompt_end in _made_up_answers(template):
        for known in FORMATS.values():
            parsed = known.read(
                answer, stopped=True, opened_by_prompt=known.opened_by(prompt_end), schemas=schemas_of([_TOOL])
            )
            if [(call.name, call.arguments) for call in parsed.ok_tool_calls] == [(_NAME, _ARGUMENTS)]:
                return known
        writes_calls = writes_calls or _NAME in answer
    if writes_calls:
        return NoCalls()
    source = str(template.tokenizer.chat_template)
    return next((known for known in FORMATS.values() if any(map(source.__contains__, known.signs))), NoCalls())


def _made_up_answers(template: ChatTemplate) -> Iterator[tuple[str, str]]:
    """What the template writes for an answer with a call, with and without the answer's header, and what is before."""
    asked = template.rendered_or_none([_QUESTION], [_TOOL], add_generation_prompt=False)
    prompt = template.rendered_or_none([_QUESTION], [_TOOL])
    answer = {"role": "assistant", "content": "", "tool_calls": [made_up_call("call00001", _NAME, _ARGUMENTS)]}
    whole = template.rendered_or_none([_QUESTION, answer], [_TOOL], add_generation_prompt=False)
    if asked is None or prompt is None or whole is None:
        return
    for before in (asked, prompt):
        pairs = zip(before, whole, strict=False)
        begin = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(before), len(whole)))
        stop = template.first_stop(whole, begin)
        yield whole[begin : stop[0] if stop is not None else None], before[:begin]


def names_calls(template: ChatTemplate, tails: Collection[Tail]) -> bool:
    """Whether what the template writes after a call depends on the name of what was called."""
    return any(
        template.suffix(messages, tools, _NAME) != template.suffix(messages, tools, "other")
        for messages in TAILS
        for tools in ([], [_TOOL])
        if Tail.of(messages, tools) in tails
    )


def bridged_tails(template: ChatTemplate) -> frozenset[Tail]:
    """The tails after which appending a suffix equals, token for token, rendering a whole conversation."""
    proven = set()
    for tools in [[], [_TOOL]] if shows_tools(template) else [[]]:
        for messages in [*TAILS, *_tails_with_images(template)]:
            tail = Tail.of(messages, tools)
            if tail is not None and _is_exact(template, messages, tools):
                proven.add(tail)
    return frozenset(proven)


def _tails_with_images(template: ChatTemplate) -> Iterator[Sequence[MessageLike]]:
    if template.media is None:
        return
    image = template.media.probe_part()
    for tail in TAILS:
        roles = {message["role"] for message in tail}
        for chosen in [{role} for role in sorted(roles)] + [roles] * (len(roles) > 1):
            yield [_with_image(message, image) if message["role"] in chosen else message for message in tail]


def _with_image(message: MessageLike, image: MessageLike) -> MessageLike:
    return {**message, "content": [{"type": "text", "text": message["content"]}, image]}


def _is_exact(template: ChatTemplate, tail: Sequence[MessageLike], tools: Sequence[ToolSpec]) -> bool:
    question: MessageLike = _QUESTION
    if template.media is not None and has_media(tail):  # some templates number the images of a conversation
        question = _with_image(_QUESTION, template.media.probe_part())
    answer: dict[str, Any] = {"role": "assistant", "content": _ANSWER}
    calls = [made_up_call(m["tool_call_id"], _NAME, {"key": _ANSWER}) for m in tail if m["role"] == "tool"]
    if calls:
        answer["tool_calls"] = calls
    whole = template.rendered_or_none([question, answer, *tail], tools)
    # With a prompt for an answer, and without one: some templates close a conversation that asks for none.
    asked = [template.rendered_or_none([question], tools, add_generation_prompt=prompt) for prompt in (True, False)]
    # Where later messages change what stands before the answer, a suffix could not know it.
    before = next((text for text in asked if text is not None and whole is not None and whole.startswith(text)), None)
    if whole is None or before is None:
        return False
    at = whole.find(_ANSWER, len(before))
    stop = template.first_stop(whole, at + len(_ANSWER)) if at >= 0 else None
    if stop is None:
        return False
    ids, sampled = template.encoder.encode(whole), template.encoder.encode(whole[: stop[1]])
    expected = Suffix(sampled[-1], ids[len(sampled) :])
    return ids[: len(sampled)] == sampled and template.suffix(tail, tools, _NAME) == expected
