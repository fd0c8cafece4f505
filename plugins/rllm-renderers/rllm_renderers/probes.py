"""The corpus of conversations for probing parsers, and the comparison of renderings.

Everything a parser concludes about a model comes from this corpus: whether prompts can be continued token for token,
which family of the package matches the template, and whether the model sees tools. Conversations vary in system
message, number of turns, reasoning and number of calls, and their text ends in a full stop, in newlines or in other
alphabets. A conversation that cannot be rendered proves nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from rllm_core.parser import ToolSpec
from rllm_core.types import MessageLike
from rllm_renderers.media import has_media

_SENTINEL = "sentinel0of0an0answer"
_PLAIN_WORDS = re.compile(r"[A-Za-z0-9 ]{5,}")  # Templates and JSON never escape these.
_CONTEXT = 30
_TOKENS_AROUND = 3


class Tail(NamedTuple):
    """A kind of continuation after an assistant message, of the form ``[tool*, user?]``.

    Attributes:
        answers: Number of tool results; 2 means two or more.
        user: Whether a user message follows.
        tools: Whether tools are offered.
        images: Roles whose messages contain images.
    """

    answers: int
    user: bool
    tools: bool
    images: frozenset[str] = frozenset()

    @classmethod
    def of(cls, new_messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None) -> Self | None:
        """Returns the kind of ``new_messages``, or None for any other continuation."""
        roles = [message.get("role") for message in new_messages]
        answers = roles.count("tool")
        if not roles or roles[answers:] not in ([], ["user"]):
            return None
        images = frozenset(str(message.get("role")) for message in new_messages if has_media([message]))
        return cls(min(answers, 2), len(roles) > answers, bool(tools), images)


@dataclass(frozen=True)
class Suffix:
    """The stop token after an assistant message, and the tokens that follow it."""

    stop_id: int
    token_ids: list[int]


class Rendering(Protocol):
    """A way to write conversations: a chat template, a family of the package, or a renderer of the cookbook."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Ids that end an assistant turn."""

    def ids_or_none(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[ToolSpec] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int] | None:
        """Returns the ids of a conversation, or None if it is rejected."""

    def suffix(
        self, new_messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None, called: str | None = None
    ) -> Suffix | None:
        """Returns the suffix that appends ``new_messages`` to an assistant message, or None if it is not separable."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, with nothing omitted."""


# --------------------------------------------------------------------------------------------------------------------
# The corpus

NAME, ARGUMENTS = "look_up", {"key": "of the door", "limit": 3}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Looks a key up.",
        "parameters": {
            "type": "object",
            "properties": {  # Some templates print descriptions unconditionally.
                "key": {"type": "string", "description": "What to look for."},
                "limit": {"type": "integer", "description": "How many."},
            },
            "required": ["key"],
        },
    },
}
QUESTION = {"role": "user", "content": "What is it now?"}
_SYSTEM = {"role": "system", "content": "Be brief."}
_ODD = {"role": "user", "content": "\nGib mir Öl für 3 天!\n\n"}
_NEXT = {"role": "user", "content": "Go on, please."}
_RESULTS = (
    {"role": "tool", "tool_call_id": "call00001", "name": NAME, "content": "12 of them."},
    {"role": "tool", "tool_call_id": "call00002", "name": NAME, "content": '\n{"größe": [1, null]}\n'},
)
SAYINGS = ("Let me see", "Let me see.")
_SOUGHT = "Now I know"


def made_up_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool call in the form templates expect."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def answer(text: str, results: int = 0, *, reasoning: bool = False, said: str = "") -> dict[str, Any]:
    """Returns an assistant message with ``text`` and ``results`` calls, each with ``said`` in its arguments."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = "There may be more."
    calls = [made_up_call(result["tool_call_id"], NAME, ARGUMENTS | {"key": said}) for result in _RESULTS[:results]]
    return message | ({"tool_calls": calls} if calls else {})


def histories() -> Iterator[list[MessageLike]]:
    """Yields histories before an assistant message, in the order in which differences are reported."""
    yield [QUESTION]
    yield [_SYSTEM, QUESTION]
    yield [_ODD]
    yield [QUESTION, answer(SAYINGS[1]), _ODD]
    yield [_SYSTEM, QUESTION, answer(SAYINGS[0], reasoning=True), _NEXT, answer(SAYINGS[1]), QUESTION]
    for system in ([], [_SYSTEM]):  # Some templates then write earlier results differently.
        yield [*system, QUESTION, answer("", 1, said="of the door"), _RESULTS[0]]
    turn = [answer(SAYINGS[1], 1, reasoning=True, said="a"), _RESULTS[0]]
    yield [_SYSTEM, QUESTION, *turn, answer("\nIt is Öl.\n"), _NEXT]


def tails() -> Iterator[list[dict[str, Any]]]:
    """Yields continuations after an assistant message."""
    yield [_NEXT]
    for count, user in itertools.product((1, 2), (False, True)):
        yield [*_RESULTS[:count], *([_ODD] if user else [])]
    yield [_ODD]


def answers(results: int) -> Iterator[dict[str, Any]]:
    """Yields assistant messages whose text can be found again, even if text next to calls is dropped."""
    for text in (_SOUGHT, f"{_SOUGHT}.", *([""] if results else [])):
        for reasoning in (False, True):
            yield answer(text, results, reasoning=reasoning, said=_SOUGHT)


def conversations() -> Iterator[tuple[list[MessageLike], Sequence[ToolSpec]]]:
    """Yields conversations that await an answer, each with the offered tools."""
    for tools in ([], [TOOL]):
        for history in histories():
            yield history, tools
        for tail in tails():
            for said in answers(sum(message["role"] == "tool" for message in tail)):
                yield [QUESTION, said, *tail], tools


# --------------------------------------------------------------------------------------------------------------------
# The comparisons


def shows_tools(rendering: Rendering) -> bool:
    """Returns whether offered tools are written into the prompt."""
    offered = rendering.ids_or_none([QUESTION], [TOOL])
    return offered is not None and offered != rendering.ids_or_none([QUESTION])


def made_up_history(new_messages: Sequence[MessageLike], called: str | None) -> list[dict[str, Any]]:
    """Returns a question and an answer with the sentinel, in its text and in one call per tool result to come."""
    said: dict[str, Any] = {"role": "assistant", "content": _SENTINEL}
    calls = [
        # Some templates omit an answer's text if it has a call.
        made_up_call(message.get("tool_call_id") or f"call0000{position}", called or "made_up", {"of": _SENTINEL})
        for position, message in enumerate(new_messages)
        if message["role"] == "tool"
    ]
    return [{"role": "user", "content": "?"}, said | ({"tool_calls": calls} if calls else {})]


def after(rendering: Rendering, ids: Sequence[int], said: str = _SENTINEL, start: int = 0) -> Suffix | None:
    """Returns the stop token after ``said`` in ``ids[start:]`` and what follows, or None if either is missing."""
    stops = set(rendering.stop_token_ids)
    for at in range(start, len(ids)):
        if ids[at] in stops:
            if said in rendering.decode(ids[start:at]):
                return Suffix(ids[at], list(ids[at + 1 :]))
            start = at + 1
    return None


def bridged_tails(
    rendering: Rendering,
    reasoning_tags: tuple[str, str],
    with_image: Callable[[MessageLike], MessageLike] | None = None,
) -> frozenset[Tail]:
    """Returns the tails for which appending a suffix equals, token for token, rendering the whole conversation.

    Args:
        rendering: Way to write conversations.
        reasoning_tags: Tags around reasoning, which may be dropped from earlier turns.
        with_image: Adds an image to a message; None if images are not supported.
    """
    begin, end = map(re.escape, reasoning_tags)
    thought = re.compile(rf"{begin}.*?{end}|{end}", re.DOTALL)
    proven: dict[Tail, bool] = {}
    for tools in [[], [TOOL]] if shows_tools(rendering) else [[]]:
        histories = _Histories(rendering, tools, thought)
        for plain in tails():
            for tail in [plain, *(_with_images(plain, with_image) if with_image is not None else ())]:
                kind = Tail.of(tail, tools)
                if kind is not None and proven.get(kind, True):
                    proven[kind] = histories.go_on_with(tail, with_image if has_media(tail) else None)
    return frozenset(kind for kind, exact in proven.items() if exact)


def _with_images(
    tail: Sequence[MessageLike], with_image: Callable[[MessageLike], MessageLike]
) -> Iterator[list[MessageLike]]:
    roles = {message["role"] for message in tail}
    for chosen in [{role} for role in sorted(roles)] + [roles] * (len(roles) > 1):
        yield [with_image(message) if message["role"] in chosen else message for message in tail]


class _Histories:
    """The histories of the corpus, as a rendering writes them before an answer."""

    def __init__(self, rendering: Rendering, tools: Sequence[ToolSpec], thought: re.Pattern[str]) -> None:
        self._rendering, self._tools, self._thought = rendering, tools, thought
        self._plain = [(history, self._prompts(history)) for history in histories()]

    def go_on_with(self, tail: Sequence[MessageLike], with_image: Callable[[MessageLike], MessageLike] | None) -> bool:
        """Returns whether the suffix follows every answer to every history."""
        suffix, shown = self._rendering.suffix(tail, self._tools, NAME), False
        if suffix is None or not _says(self._rendering.decode(suffix.token_ids), tail):
            return False
        results = sum(message["role"] == "tool" for message in tail)
        for number, (history, asked) in enumerate(self._plain):
            if with_image is not None:  # Some templates number images.
                history = [with_image(history[0]), *history[1:]]
                asked = self._prompts(history)
            # Combine the first history with every answer of the corpus, the others with the first answer only.
            for said in itertools.islice(answers(results), None if not number else 1) if asked else ():
                whole = self._rendering.ids_or_none([*history, said, *tail], self._tools)
                if whole is None or _SOUGHT not in self._rendering.decode(whole):
                    continue  # a conversation that is rejected proves nothing
                if not self._is_exact(asked, whole, suffix):
                    return False
                shown = True
        return shown

    def _is_exact(self, asked: Sequence[str], whole: list[int], suffix: Suffix) -> bool:
        ending = [suffix.stop_id, *suffix.token_ids]
        if whole[-len(ending) :] != ending:
            return False
        said = whole[: -len(ending)]
        stops = self._rendering.stop_token_ids
        last = next((at for at in range(len(said) - 1, -1, -1) if said[at] in stops), -1)
        # If later messages change the text before the answer, appending a suffix cannot reproduce that.
        text = self._rendering.decode(whole)
        return any(self._begins_with(text, prompt) for prompt in asked) and _SOUGHT in self._rendering.decode(
            said[last + 1 :]
        )

    def _begins_with(self, text: str, prompt: str) -> bool:
        """Returns whether ``text`` starts with ``prompt``, ignoring reasoning and white space.

        Some templates write a line break after a result once something follows it.
        """
        if text.startswith(prompt):
            return True
        bare = ("".join(self._thought.sub("", one).split()) for one in (text, prompt))
        return next(bare).startswith(next(bare))

    def _prompts(self, history: Sequence[MessageLike]) -> list[str]:
        """Returns the possible texts of a history before an answer, or nothing if it is rejected.

        Variants with and without a generation prompt: some templates close a conversation that awaits no answer.
        """
        forgotten = [{key: value for key, value in one.items() if key != "reasoning_content"} for one in history]
        found = [
            self._rendering.ids_or_none(variant, self._tools, add_generation_prompt=prompt)
            for variant in ([history] if forgotten == list(history) else [history, forgotten])
            for prompt in (True, False)
        ]
        if found[0] is None:
            return []
        return [self._rendering.decode(ids) for ids in found if ids is not None]


def _says(text: str, messages: Sequence[MessageLike]) -> bool:
    """Returns whether ``text`` contains the plain words of messages.

    If the token that begins a user turn also ends the assistant's, results come before it.
    """
    found = (_PLAIN_WORDS.search(one["content"]) for one in messages if isinstance(one["content"], str))
    return all(words[0].strip() in text for words in found if words is not None)


def names_calls(rendering: Rendering, kinds: frozenset[Tail]) -> bool:
    """Returns whether the text after a call depends on the name of the called tool."""
    return any(
        rendering.suffix(unnamed, tools, NAME) != rendering.suffix(unnamed, tools, "other")
        for tail in tails()
        for unnamed in [[{key: one[key] for key in one if key != "name"} for one in tail]]
        for tools in ([], [TOOL])
        if Tail.of(tail, tools) in kinds
    )


@dataclass(frozen=True)
class Difference:
    """The first difference between two renderings of a conversation.

    Attributes:
        outcome: ``"other text"``, ``"same text, other tokens"``, or ``"rejected"`` by the second.
        where: Kind of the conversation.
        spot: Both renderings around the first difference.
        of_prompt: Whether the conversation has no answer yet.
    """

    outcome: str
    where: str
    spot: str
    of_prompt: bool

    def __str__(self) -> str:
        return f"{self.outcome} {self.where}{': ' if self.spot else ''}{self.spot}"


def difference(expected: Rendering, other: Rendering) -> Difference | None:
    """Returns the first difference of ``other`` from ``expected`` on the corpus, preferably without answers.

    Conversations that ``expected`` rejects are skipped. Returns None if all others are equal, token for token.
    """
    first: Difference | None = None
    for messages, tools in conversations():
        of_prompt = not has_answers(messages)
        if first is not None and not of_prompt:
            continue
        ids = expected.ids_or_none(messages, tools)
        written = None if ids is None else other.ids_or_none(messages, tools)
        if written == ids:
            continue
        assert ids is not None
        where = f"{'with' if tools else 'without'} tools, {len(messages)} messages"
        found = Difference("rejected", where, "", of_prompt)
        if written is not None:
            found = Difference(*_told(expected, ids, written, where), of_prompt)
        if of_prompt:
            return found
        first = found
    return first


def has_answers(messages: Sequence[MessageLike]) -> bool:
    """Returns whether the conversation contains an assistant or tool message."""
    return any(one["role"] in ("assistant", "tool") for one in messages)


def _told(rendering: Rendering, ids: list[int], written: list[int], where: str) -> tuple[str, str, str]:
    left, right = rendering.decode(ids), rendering.decode(written)
    if left != right:
        at = _first_difference(left, right)
        spots = (text[max(0, at - _CONTEXT) : at + _CONTEXT] for text in (left, right))
        return "other text", where, "{!r} is {!r}".format(*spots)
    at = _first_difference(ids, written)
    pieces = ([rendering.decode([token]) for token in row[at : at + _TOKENS_AROUND]] for row in (ids, written))
    return "same text, other tokens", where, "{} are {}".format(*pieces)


def _first_difference(left: Sequence[Any], right: Sequence[Any]) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))
