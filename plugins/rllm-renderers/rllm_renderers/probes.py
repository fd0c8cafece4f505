"""The one corpus of conversations that parsers are probed with, and the one comparison.

Everything a parser concludes about a model (whether prompts can be continued token for token, which family of the
package writes like its template, whether tools are shown) comes from these conversations: with a system message and
without, of one turn and of several, with reasoning, with one call and several, with text that ends in a full stop, in
newlines or in other alphabets. A conversation that cannot be rendered proves nothing.
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
_PLAIN_WORDS = re.compile(r"[A-Za-z0-9 ]{5,}")  # which no template and no JSON spells otherwise
_CONTEXT = 30
_TOKENS_AROUND = 3


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


@dataclass(frozen=True)
class Suffix:
    """The stop token that is written after an assistant's message, and the tokens that follow it."""

    stop_id: int
    token_ids: list[int]


class Rendering(Protocol):
    """Whatever writes conversations: a chat template, a family of the package, a renderer of the cookbook."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Ids that end an assistant's turn."""

    def ids_or_none(
        self,
        messages: Sequence[MessageLike],
        tools: Sequence[ToolSpec] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int] | None:
        """The ids of a conversation, or None if it is refused."""

    def suffix(
        self, new_messages: Sequence[MessageLike], tools: Sequence[ToolSpec] | None, called: str | None = None
    ) -> Suffix | None:
        """What follows an assistant's message when ``new_messages`` come next; None if that cannot be told apart."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, with nothing left out."""


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
            "properties": {  # with descriptions, which some templates print without looking whether there are any
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
    """A tool call in the shape that templates expect."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def answer(text: str, results: int = 0, *, reasoning: bool = False, said: str = "") -> dict[str, Any]:
    """An assistant's message with ``text``, as many calls as there are ``results``, and ``said`` in each of them."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = "There may be more."
    calls = [made_up_call(result["tool_call_id"], NAME, ARGUMENTS | {"key": said}) for result in _RESULTS[:results]]
    return message | ({"tool_calls": calls} if calls else {})


def histories() -> Iterator[list[MessageLike]]:
    """What may stand before an assistant's message, in the order in which differences are told."""
    yield [QUESTION]
    yield [_SYSTEM, QUESTION]
    yield [_ODD]
    yield [QUESTION, answer(SAYINGS[1]), _ODD]
    yield [_SYSTEM, QUESTION, answer(SAYINGS[0], reasoning=True), _NEXT, answer(SAYINGS[1]), QUESTION]
    for system in ([], [_SYSTEM]):  # in some templates, a result that is not the last is written otherwise after it
        yield [*system, QUESTION, answer("", 1, said="of the door"), _RESULTS[0]]
    turn = [answer(SAYINGS[1], 1, reasoning=True, said="a"), _RESULTS[0]]
    yield [_SYSTEM, QUESTION, *turn, answer("\nIt is Öl.\n"), _NEXT]


def tails() -> Iterator[list[dict[str, Any]]]:
    """What may follow an assistant's message."""
    yield [_NEXT]
    for count, user in itertools.product((1, 2), (False, True)):
        yield [*_RESULTS[:count], *([_ODD] if user else [])]
    yield [_ODD]


def answers(results: int) -> Iterator[dict[str, Any]]:
    """The assistant's message in between; what it says can be found again, also where text next to calls is dropped."""
    for text in (_SOUGHT, f"{_SOUGHT}.", *([""] if results else [])):
        for reasoning in (False, True):
            yield answer(text, results, reasoning=reasoning, said=_SOUGHT)


def conversations() -> Iterator[tuple[list[MessageLike], list[ToolSpec]]]:
    """Whole conversations that ask for an answer, each with the tools on offer."""
    for tools in ([], [TOOL]):
        for history in histories():
            yield history, tools
        for tail in tails():
            for said in answers(sum(message["role"] == "tool" for message in tail)):
                yield [QUESTION, said, *tail], tools


# --------------------------------------------------------------------------------------------------------------------
# The comparisons


def shows_tools(rendering: Rendering) -> bool:
    """Whether the tools on offer are written."""
    offered = rendering.ids_or_none([QUESTION], [TOOL])
    return offered is not None and offered != rendering.ids_or_none([QUESTION])


def made_up_history(new_messages: Sequence[MessageLike], called: str | None) -> list[dict[str, Any]]:
    """A question and an answer that says the sentinel, also in a call for each tool's answer in ``new_messages``."""
    said: dict[str, Any] = {"role": "assistant", "content": _SENTINEL}
    calls = [
        # Some templates leave out the answer's text where there is a call.
        made_up_call(message.get("tool_call_id") or f"call0000{position}", called or "made_up", {"of": _SENTINEL})
        for position, message in enumerate(new_messages)
        if message["role"] == "tool"
    ]
    return [{"role": "user", "content": "?"}, said | ({"tool_calls": calls} if calls else {})]


def after(rendering: Rendering, ids: Sequence[int], said: str = _SENTINEL, start: int = 0) -> Suffix | None:
    """The stop token after ``said`` in ``ids[start:]``, and what follows it; None if either is missing."""
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
    """The tails after which appending a suffix equals, token for token, rendering a whole conversation.

    Args:
        rendering: What writes the conversations.
        reasoning_tags: What stands around reasoning, which may be dropped from what was said before.
        with_image: Adds an image to a message; None where there can be none.
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
    """The histories of the corpus, as one way of rendering writes them in front of an answer."""

    def __init__(self, rendering: Rendering, tools: Sequence[ToolSpec], thought: re.Pattern[str]) -> None:
        self._rendering, self._tools, self._thought = rendering, tools, thought
        self._plain = [(history, self._prompts(history)) for history in histories()]

    def go_on_with(self, tail: Sequence[MessageLike], with_image: Callable[[MessageLike], MessageLike] | None) -> bool:
        """Whether every answer to every history is followed by the suffix."""
        suffix, shown = self._rendering.suffix(tail, self._tools, NAME), False
        if suffix is None or not _says(self._rendering.decode(suffix.token_ids), tail):
            return False
        results = sum(message["role"] == "tool" for message in tail)
        for number, (history, asked) in enumerate(self._plain):
            if with_image is not None:  # some templates number the images of a conversation
                history = [with_image(history[0]), *history[1:]]
                asked = self._prompts(history)
            # The first history meets every answer of the corpus, the others only the first answer.
            for said in itertools.islice(answers(results), None if not number else 1) if asked else ():
                whole = self._rendering.ids_or_none([*history, said, *tail], self._tools)
                if whole is None or _SOUGHT not in self._rendering.decode(whole):
                    continue  # which proves nothing
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
        # Where later messages change what stands before the answer, a suffix could not know it.
        text = self._rendering.decode(whole)
        return any(self._begins_with(text, prompt) for prompt in asked) and _SOUGHT in self._rendering.decode(
            said[last + 1 :]
        )

    def _begins_with(self, text: str, prompt: str) -> bool:
        """Whether ``prompt`` stands before the rest, perhaps without its reasoning, and with other white space.

        Some templates write a line break behind a result once something follows it.
        """
        if text.startswith(prompt):
            return True
        bare = ("".join(self._thought.sub("", one).split()) for one in (text, prompt))
        return next(bare).startswith(next(bare))

    def _prompts(self, history: Sequence[MessageLike]) -> list[str]:
        """What the history may look like in front of an answer; nothing if it is refused.

        With a prompt for the answer, and without one: some templates close a conversation that asks for none.
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
    """Whether the plain words of messages stand in ``text``.

    Where the token that begins a user's turn ends the assistant's, results stand before it.
    """
    found = (_PLAIN_WORDS.search(one["content"]) for one in messages if isinstance(one["content"], str))
    return all(words[0].strip() in text for words in found if words is not None)


def names_calls(rendering: Rendering, kinds: frozenset[Tail]) -> bool:
    """Whether what is written after a call depends on the name of what was called."""
    return any(
        rendering.suffix(unnamed, tools, NAME) != rendering.suffix(unnamed, tools, "other")
        for tail in tails()
        for unnamed in [[{key: one[key] for key in one if key != "name"} for one in tail]]
        for tools in ([], [TOOL])
        if Tail.of(tail, tools) in kinds
    )


@dataclass(frozen=True)
class Difference:
    """Where two ways of writing a conversation differ first.

    Attributes:
        outcome: ``"other text"``, ``"same text, other tokens"``, or ``"refused"`` by the second.
        where: In which kind of conversation.
        spot: The first place, as both write it.
        of_prompt: Whether it is in a conversation that has no answer yet.
    """

    outcome: str
    where: str
    spot: str
    of_prompt: bool

    def __str__(self) -> str:
        return f"{self.outcome} {self.where}{': ' if self.spot else ''}{self.spot}"


def difference(expected: Rendering, other: Rendering) -> Difference | None:
    """How ``other`` differs first from ``expected`` on the corpus, in what has no answer yet if it does there.

    Conversations that ``expected`` refuses are left out. None if all others are the same, token for token.
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
        found = Difference("refused", where, "", of_prompt)
        if written is not None:
            found = Difference(*_told(expected, ids, written, where), of_prompt)
        if of_prompt:
            return found
        first = found
    return first


def has_answers(messages: Sequence[MessageLike]) -> bool:
    """Whether somebody answered already."""
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
