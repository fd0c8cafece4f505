"""Tests that a conversation is one token sequence, or reports where and why it is not."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm_core.parser import (
    Appended,
    BreakReason,
    ParsedCompletion,
    ParsedToolCall,
    ParserSession,
    SegmentBreak,
    Turn,
)
from rllm_core.types import Messages, PlacedMedia, new_id

USER = {"role": "user", "content": "ask"}
TOOL = {"role": "tool", "content": "result"}
PARSERS = ["LetterParser", "BridgingParser", "AppendingParser", "NoncompliantParser", "MergingParser"]

tails = st.builds(lambda tools, user: [TOOL] * tools + [USER] * user, st.integers(0, 2), st.booleans()).filter(bool)
# Completions may be anything: letters, control tokens in the middle, no stop, two stops, nothing at all.
completions = st.one_of(
    st.lists(st.integers(0, 300), max_size=8),
    st.lists(st.integers(150, 220), max_size=6).map(lambda ids: [*ids, 1]),
    st.lists(st.integers(150, 220), max_size=3).map(lambda ids: [*ids, 1, 2]),
)


def begins_with(tokens: Any, prefix: Any) -> bool:
    return [int(t) for t in tokens][: len(prefix)] == [int(t) for t in prefix]


@pytest.mark.parametrize("parser", PARSERS)
@given(turns=st.lists(st.tuples(completions, tails), min_size=1, max_size=5), plain_lists=st.booleans())
def test_within_a_segment_every_prompt_begins_with_the_prompt_and_completion_before_it(
    toys: SimpleNamespace, parser: str, turns: list[tuple[list[int], list[Any]]], plain_lists: bool
) -> None:
    session = getattr(toys, parser)().session()
    conversation: Any = [USER] if plain_lists else Messages([USER])
    seen: list[tuple[Turn, list[int], list[int]]] = []
    for sampled, tail in turns:
        turn = session.next_prompt(list(conversation) if plain_lists else conversation)
        session.record(sampled)
        assert session.last_completion_ids.tolist() == sampled
        seen.append((turn, turn.prompt_ids.tolist(), sampled))
        conversation.append(session.answer)
        conversation.extend(tail)

    for (_, prompt, sampled), (turn, later, _) in itertools.pairwise(seen):
        if turn.break_reason is None:
            assert begins_with(later, prompt + sampled)
        else:
            assert turn.break_reason in session.stats.breaks
    for before, (turn, _, _) in zip([None, *seen], seen, strict=False):
        expected = 0 if before is None else before[0].segment + (turn.break_reason is not None)
        assert turn.segment == expected
    assert session.stats.breaks.total() == seen[-1][0].segment
    assert session.stats.turns == len(turns)
    assert session.stats.bridged + session.stats.rendered == len(turns)
    for turn, prompt, _ in seen:  # prompts returned earlier are unchanged
        assert turn.prompt_ids.tolist() == prompt
        assert not turn.prompt_ids.flags.writeable
    assert [[s.token_ids[a:b].tolist() for a, b in s.completion_spans] for s in session.segments] == [
        [sampled for _, _, sampled in turns] for _, turns in itertools.groupby(seen, key=lambda turn: turn[0].segment)
    ]
    assert sum(int(s.loss_mask.sum()) for s in session.segments) == sum(len(sampled) for _, _, sampled in seen)
    for number, segment in enumerate(session.segments):
        last = [turn for turn, _, _ in seen if turn.segment == number][-1]
        assert begins_with(segment.token_ids, last.prompt_ids)


@pytest.mark.parametrize(
    ("parser", "reasons"),
    [
        ("LetterParser", [None, None]),
        ("BridgingParser", [None, None]),
        ("NoncompliantParser", [BreakReason.PREFIX_MISMATCH] * 2),
        ("MergingParser", [BreakReason.BRIDGE_NONE] * 2),
    ],
)
def test_the_prefix_is_checked_for_every_parser_bridge_or_not(
    toys: SimpleNamespace, parser: str, reasons: list[BreakReason | None]
) -> None:
    session = getattr(toys, parser)().session()
    conversation = [USER]
    found = []
    for answer in ("one", "two", "three"):
        turn = session.next_prompt(conversation)
        found.append(turn.break_reason)
        session.record(toys.letters(answer))
        conversation = [*conversation, session.answer, USER]
    assert found == [None, *reasons]
    whole = toys.LetterParser() if parser == "NoncompliantParser" else session.parser
    if reasons[0] is not None:  # a new segment is a plain rendering of the whole conversation
        assert turn.prompt_ids.tolist() == whole.render(conversation[:-2])
    assert session.stats.breaks.total() == sum(reason is not None for reason in reasons)


def test_a_rendering_parser_goes_on_only_where_the_text_says_exactly_what_was_sampled(toys: SimpleNamespace) -> None:
    session = toys.LetterParser().session()
    session.next_prompt([USER])
    odd = [7, *toys.letters("ok")]  # token 7 is not a letter, so it does not survive the text round trip
    session.record(odd)
    assert session.answer["content"] == "ok"
    turn = session.next_prompt([USER, session.answer, USER])
    assert turn.break_reason is BreakReason.BRIDGE_NONE
    bridging = toys.BridgingParser().session()
    bridging.next_prompt([USER])
    bridging.record(odd)
    turn = bridging.next_prompt([USER, bridging.answer, USER])
    assert turn.break_reason is None
    assert odd == turn.prompt_ids.tolist()[len(toys.LetterParser().render([USER])) :][: len(odd)]


def answered(toys: SimpleNamespace, sampled: list[int] | None = None, **options: Any) -> ParserSession:
    session: ParserSession = toys.BridgingParser().session(**options)
    session.next_prompt([USER])
    session.record(toys.letters("hi") if sampled is None else sampled)
    return session


def breaking_conversations(answer: Any) -> dict[BreakReason, list[Any]]:
    return {
        BreakReason.HISTORY_EDITED: [{"role": "user", "content": "other"}, answer, USER],
        BreakReason.SHRUNK: [USER],
        BreakReason.ASSISTANT_INSERTED: [USER, answer, {"role": "assistant", "content": "me"}, USER],
    }


@pytest.mark.parametrize("reason", breaking_conversations(None))
def test_a_break_has_a_reason_a_counter_and_a_fresh_rendering(toys: SimpleNamespace, reason: BreakReason) -> None:
    session = answered(toys)
    before = session.last_completion_ids
    conversation = breaking_conversations(session.answer)[reason]
    turn = session.next_prompt(conversation)
    assert (turn.break_reason, turn.segment) == (reason, 1)
    assert session.stats.breaks == {reason: 1}
    assert turn.prompt_ids.tolist() == session.parser.render(conversation)
    assert before.tolist() == toys.letters("hi")


SYSTEM = {"role": "system", "content": "x"}


@pytest.mark.parametrize("tail", [[USER], [TOOL], [TOOL, TOOL, USER], [USER, USER], [USER, TOOL], [SYSTEM, USER]])
def test_a_parser_is_asked_for_a_bridge_to_any_messages(toys: SimpleNamespace, tail: list[Any]) -> None:
    session = answered(toys)
    before = [*toys.LetterParser().render([USER]), *toys.letters("hi")]
    turn = session.next_prompt([USER, session.answer, *tail])
    assert turn.break_reason is None
    assert turn.prompt_ids.tolist() == [*before, *toys.LetterParser().render(tail)]


def test_a_parser_may_refuse_a_bridge_because_of_the_messages(toys: SimpleNamespace) -> None:
    class Careful(toys.BridgingParser):  # type: ignore[misc]
        def bridge_to_next_turn(self, prompt_ids: Any, completion_ids: Any, new_messages: Any, **more: Any) -> Any:
            if [m["role"] for m in new_messages] != ["user"]:
                return None
            return super().bridge_to_next_turn(prompt_ids, completion_ids, new_messages, **more)

    session = Careful().session()
    session.next_prompt([USER])
    session.record([7, *toys.letters("hi")])  # a token that the text does not show
    assert session.next_prompt([USER, session.answer, SYSTEM, USER]).break_reason is BreakReason.BRIDGE_NONE


@pytest.mark.parametrize("wrong", [{"role": "user", "text": "ask"}, {"role": "system"}, {"role": "tool", "id": "1"}])
def test_a_new_message_without_content_is_refused(toys: SimpleNamespace, wrong: dict[str, Any]) -> None:
    """A template renders it as empty, so training would go on with a question that nobody sees."""
    session = toys.LetterParser().session()
    with pytest.raises(ValueError, match=f"a message of role '{wrong['role']}' needs content; it has 'role'"):
        session.next_prompt([wrong])
    session.next_prompt([USER])
    session.record([1])
    with pytest.raises(ValueError, match="needs content"):
        session.next_prompt([USER, session.answer, wrong])
    assert session.next_prompt([USER, session.answer, {"role": "user", "content": ""}]).prompt_ids.size


def test_a_turn_adds_something(toys: SimpleNamespace) -> None:
    session = answered(toys)
    assert session.next_prompt([USER, session.answer]).break_reason is BreakReason.HISTORY_EDITED


@pytest.mark.parametrize(
    ("tail_of_completion", "reason"),
    [
        ([], None),
        (["PAD"], None),
        ([150], BreakReason.TOKENS_AFTER_STOP),
        (["PAD", 150], BreakReason.TOKENS_AFTER_STOP),
    ],
)
def test_tokens_after_the_stop_are_never_dropped(
    toys: SimpleNamespace, tail_of_completion: list[Any], reason: BreakReason | None
) -> None:
    sampled = toys.letters("hi") + [toys.PAD if t == "PAD" else t for t in tail_of_completion]
    session = answered(toys, sampled)
    assert session.last_completion_ids.tolist() == sampled
    assert session.next_prompt([USER, session.answer, USER]).break_reason is reason


def test_changed_tools_break_and_none_keeps_them(toys: SimpleNamespace) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    session = toys.BridgingParser().session(tools=[tool])
    first = session.next_prompt([USER])
    assert first.prompt_ids[0] == 8
    session.record(toys.letters("a"))
    conversation = [USER, session.answer, USER]
    assert session.next_prompt(conversation).break_reason is None
    session.discard()
    assert session.next_prompt(conversation, tools=[dict(reversed(tool.items()))]).break_reason is None
    session.discard()
    turn = session.next_prompt(conversation, tools=[])
    assert turn.break_reason is BreakReason.TOOLS_CHANGED
    assert 8 not in turn.prompt_ids
    assert session.tools is None
    session.record(toys.letters("b"))
    assert session.next_prompt([*conversation, session.answer, USER]).break_reason is None


def test_the_same_question_twice_is_the_same_turn(toys: SimpleNamespace) -> None:
    session = answered(toys)
    conversation = [USER, session.answer, USER]
    turn = session.next_prompt(conversation)
    assert session.next_prompt([dict(m) for m in conversation]) is turn
    assert session.stats.bridged == 1
    session.record(toys.letters("there"))
    with pytest.raises(RuntimeError, match="next_prompt"):
        session.record(toys.letters("again"))
    assert session.last_prompt_ids.tolist() == turn.prompt_ids.tolist()
    assert session.last_completion_ids.tolist() == toys.letters("there")


def test_another_question_before_the_answer_is_an_error_until_the_first_is_discarded(toys: SimpleNamespace) -> None:
    session = toys.BridgingParser().session()
    with pytest.raises(RuntimeError, match="next_prompt"):
        session.record([1])
    with pytest.raises(RuntimeError, match="nothing has been recorded"):
        _ = session.answer
    with pytest.raises(RuntimeError, match="nothing has been recorded"):
        _ = session.last_completion_ids
    with pytest.raises(RuntimeError, match="nothing has been recorded"):
        _ = session.last_prompt_ids
    session.next_prompt([USER])
    with pytest.raises(RuntimeError, match=r"discard\(\)"):
        session.next_prompt([USER, USER])
    session.discard()
    session.discard()
    turn = session.next_prompt([TOOL])
    assert (turn.segment, turn.break_reason) == (0, None)
    assert session.consumed == [TOOL]


def test_the_same_messages_with_other_tools_are_another_question(toys: SimpleNamespace) -> None:
    session = toys.BridgingParser().session()
    turn = session.next_prompt([USER], tools=[{"name": "add"}])
    assert session.next_prompt([USER]) is turn
    assert session.next_prompt([USER], tools=[{"name": "add"}]) is turn
    for tools in ([{"name": "subtract"}], []):
        with pytest.raises(RuntimeError, match=r"discard\(\)"):
            session.next_prompt([USER], tools=tools)


@pytest.mark.parametrize("count", [-1, 1.0, None, True])
def test_a_count_that_is_none_is_refused_and_leaves_no_trace(toys: SimpleNamespace, count: Any) -> None:
    class Miscounting(toys.BridgingParser):  # type: ignore[misc]
        def count_control_tokens(self, messages: Any) -> Any:
            return count if messages[0]["content"] == "more" else 0

    session = ParserSession(Miscounting())
    session.next_prompt([USER])
    session.record(toys.letters("yes"))
    held = session.segments[0].token_ids.tolist()
    with pytest.raises(ValueError, match="must return an integer >= 0"):
        session.next_prompt([USER, session.answer, {"role": "user", "content": "more"}])
    assert session.segments[0].token_ids.tolist() == held


def appending(toys: SimpleNamespace, change: Callable[[Appended], Any]) -> ParserSession:
    """A session with an answer, whose parser appends and then changes what it appends."""

    class Appending(toys.AppendingParser):  # type: ignore[misc]
        def bridge_to_next_turn(self, *args: Any, **more: Any) -> Any:
            return change(super().bridge_to_next_turn(*args, **more))

    session = ParserSession(Appending())
    session.next_prompt([USER])
    session.record(toys.letters("yes"))
    return session


def test_a_bridge_that_appends_is_neither_put_together_nor_compared(
    toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, compared = appending(toys, lambda ids: ids), appending(toys, lambda ids: ids.tolist())
    expected = compared.next_prompt([USER, compared.answer, USER]).prompt_ids.tolist()
    with monkeypatch.context() as patched:
        patched.setattr(Appended, "__array__", lambda *_, **__: pytest.fail("the whole prompt was put together"))
        turn = session.next_prompt([USER, session.answer, USER])
    assert turn.break_reason is None
    assert turn.prompt_ids.tolist() == expected
    assert session.stats.bridged == 1


@pytest.mark.parametrize("part", ["prompt_ids", "completion_ids"])
@pytest.mark.parametrize("edit", ["another token", "a token less"])
def test_a_bridge_that_appends_to_other_tokens_is_a_break(toys: SimpleNamespace, part: str, edit: str) -> None:
    def changed(ids: Appended) -> Appended:
        edited = getattr(ids, part).tolist()
        edited[-1:] = [edited[-1] + 1] if edit == "another token" else []
        parts = {name: getattr(ids, name) for name in Appended.__slots__}
        return Appended(**parts | {part: edited})

    session = appending(toys, changed)
    assert session.next_prompt([USER, session.answer, USER]).break_reason is BreakReason.PREFIX_MISMATCH


def test_a_bridge_that_appends_to_equal_tokens_continues(toys: SimpleNamespace) -> None:
    session = appending(
        toys, lambda ids: Appended(ids.prompt_ids.tolist(), ids.completion_ids.tolist(), list(ids.new_ids))
    )
    assert session.next_prompt([USER, session.answer, USER]).break_reason is None


def test_appended_ids_read_like_a_sequence() -> None:
    ids = Appended([1, 2], np.array([3], np.int32), [4])
    assert (len(ids), list(ids), ids.tolist(), ids[-1], 3 in ids) == (4, [1, 2, 3, 4], [1, 2, 3, 4], 4, True)
    assert ids[1:].tolist() == [2, 3, 4]
    assert ids == [1, 2, 3, 4]
    assert ids != [1, 2, 3]
    assert np.asarray(ids).dtype == np.int32
    with pytest.raises(ValueError, match="token ids must"):
        Appended([1], [2], [-1]).tolist()


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("wrong", ["negative", "wide", "float"])
def test_what_a_bridge_adds_is_checked(toys: SimpleNamespace, wrong: str, appends: bool) -> None:
    class Wrong(toys.BridgingParser):  # type: ignore[misc]
        def bridge_to_next_turn(self, prompt_ids: Any, completion_ids: Any, *args: Any, **options: Any) -> Any:
            bridged = np.array(super().bridge_to_next_turn(prompt_ids, completion_ids, *args, **options), np.int32)
            if wrong == "negative":
                bridged[-1] = -1
            else:
                bridged = bridged.astype(np.int64) + 2**40 if wrong == "wide" else bridged.astype(np.float32)
            known = len(prompt_ids) + len(completion_ids)
            return Appended(prompt_ids, completion_ids, bridged[known:]) if appends else bridged

    session = ParserSession(Wrong())
    session.next_prompt([USER])
    session.record(toys.letters("yes"))
    held = session.segments[0].token_ids.tolist()
    with pytest.raises(ValueError, match="token ids must"):
        session.next_prompt([USER, session.answer, USER])
    assert session.segments[0].token_ids.tolist() == held
    assert len(session._tokens) == len(held)


@pytest.mark.parametrize("conversation", ["continued", "broken"])
def test_a_discarded_prompt_leaves_no_trace(toys: SimpleNamespace, conversation: str) -> None:
    session = answered(toys)
    follow_up = [USER, session.answer, USER] if conversation == "continued" else [TOOL]
    stats = pickle.dumps(session.stats)
    given_up = session.next_prompt(follow_up)
    ids = given_up.prompt_ids.tolist()
    session.discard()
    assert pickle.loads(stats) == session.stats  # noqa: S301
    assert len(session.segments) == 1
    assert session.consumed == [USER]
    other = {"role": "user", "content": "something else"}
    turn = session.next_prompt([USER, session.answer, other])
    assert (turn.segment, turn.break_reason) == (0, None)
    assert given_up.prompt_ids.tolist() == ids, "the engine may still read the prompt that was given up"
    assert turn.prompt_ids.tolist() != ids


@pytest.mark.parametrize(
    "rewritten",
    [
        lambda a: {**a},
        lambda a: dict(reversed(a.items())),
        lambda a: {**a, "content": None},
        lambda a: {k: v for k, v in a.items() if k != "content"},
        lambda a: {**a, "name": None},
        lambda a: {**a, "name": "agent", "refusal": None, "annotations": [], "audio": None},
        lambda a: {**a, "provider_specific_fields": {"x": 1}},
        lambda a: {**a, "content": "\n"},
        lambda a: {**a, "content": [{"type": "text", "text": " "}]},
        lambda a: {k: v for k, v in a.items() if k != "reasoning_content"},
        lambda a: {**a, "reasoning_content": " why\n"},
        lambda a: {**{k: v for k, v in a.items() if k != "reasoning_content"}, "reasoning": a["reasoning_content"]},
        lambda a: {**{k: v for k, v in a.items() if k != "reasoning_content"}, "thinking": a["reasoning_content"]},
        lambda a: {**a, "tool_calls": [{"function": {"name": "f", "arguments": {"y": [2], "x": 1}}}]},
        lambda a: {
            **a,
            "tool_calls": [{"function": {"name": "f", "arguments": '{"x":1,"y":[2]}'}, "type": "function"}],
        },
        lambda a: {**a, "tool_calls": [{"name": "f", "arguments": {"x": 1, "y": [2]}}]},
    ],
)
def test_an_answer_counts_as_the_same_however_a_client_writes_it(toys: SimpleNamespace, rewritten: Any) -> None:
    class Calling(toys.BridgingParser):  # type: ignore[misc, name-defined]
        def parse_completion(self, completion_ids: Any, **_: Any) -> ParsedCompletion:
            call = ParsedToolCall(name="f", arguments={"x": 1, "y": [2]}, raw="")
            return ParsedCompletion("", reasoning="why", tool_calls=(call,))

    session = Calling().session()
    session.next_prompt([USER])
    session.record([150, 1])
    turn = session.next_prompt([USER, rewritten(session.answer), TOOL])
    assert turn.break_reason is None


@pytest.mark.parametrize(
    "changed",
    [
        lambda a: {**a, "content": "other"},
        lambda a: {**a, "content": [{"type": "text", "text": "other"}]},
        lambda a: {**a, "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        lambda a: {**a, "reasoning_content": "other"},
        lambda a: {**a, "tool_calls": [{"function": {"name": "g", "arguments": "{}"}}]},
        lambda a: {**a, "tool_calls": [{"function": {"name": "f", "arguments": "[" * 10**5}}]},
        lambda a: {**a, "tool_calls": ["nonsense"]},
        lambda a: {**a, "tool_calls": "nonsense"},
        lambda a: {**a, "tool_calls": [{"function": "nonsense"}]},
        lambda a: {**a, "role": "user"},
    ],
)
def test_an_answer_that_says_something_else_is_an_edit(toys: SimpleNamespace, changed: Any) -> None:
    session = answered(toys)
    turn = session.next_prompt([USER, changed(session.answer), TOOL])
    assert turn.break_reason is BreakReason.HISTORY_EDITED


PICTURE = {"type": "image_url", "image_url": {"url": "data:x"}}
ASKED = {"role": "user", "content": "What is this?\nSay it.", "name": "ann"}


@pytest.mark.parametrize(
    ("asked", "again", "same"),
    [
        (ASKED, {"role": "user", "content": [{"type": "text", "text": "What is this?\nSay it."}]}, True),
        (ASKED, {**ASKED, "content": " What is this?\nSay it.\n"}, True),
        (ASKED, {**ASKED, "content": "What is this? Say it."}, False),
        (ASKED, {**ASKED, "name": "bob"}, False),
        ({"role": "user", "content": ["look", PICTURE]}, {"role": "user", "content": ["look", PICTURE]}, True),
        (
            {"role": "user", "content": [{"type": "text", "text": "look"}, PICTURE]},
            {"role": "user", "content": [{"type": "text", "text": "look", "cache_control": {"type": "x"}}, PICTURE]},
            True,
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "look"}, PICTURE]},
            {"role": "user", "content": [PICTURE, {"type": "text", "text": "look"}]},
            False,
        ),
    ],
)
def test_a_question_counts_as_the_same_however_a_client_writes_it(
    toys: SimpleNamespace, asked: Any, again: Any, same: bool
) -> None:
    session = toys.BridgingParser().session()
    session.next_prompt([asked])
    session.record(toys.letters("hi"))
    turn = session.next_prompt([again, session.answer, USER])
    assert turn.break_reason is (None if same else BreakReason.HISTORY_EDITED)


def test_a_strict_session_raises_and_can_be_used_on(toys: SimpleNamespace) -> None:
    session = answered(toys, on_break="raise")
    with pytest.raises(SegmentBreak, match="shrunk") as caught:
        session.next_prompt([USER])
    assert caught.value.reason is BreakReason.SHRUNK
    assert session.stats.breaks == {BreakReason.SHRUNK: 1}
    assert session.consumed == [USER]
    assert session.last_completion_ids.tolist() == toys.letters("hi")
    turn = session.next_prompt([USER, session.answer, USER])
    assert (turn.segment, turn.break_reason) == (0, None)
    noncompliant = toys.NoncompliantParser().session(on_break="raise")
    noncompliant.next_prompt([USER])
    noncompliant.record(toys.letters("a"))
    with pytest.raises(SegmentBreak, match="prefix_mismatch"):
        noncompliant.next_prompt([USER, noncompliant.answer, USER])


def test_a_parser_that_fails_leaves_the_session_as_it_was(toys: SimpleNamespace) -> None:
    class Failing(toys.BridgingParser):  # type: ignore[misc, name-defined]
        fails = True

        def parse_completion(self, completion_ids: Any, **kwargs: Any) -> ParsedCompletion:
            if self.fails:
                raise ZeroDivisionError
            return super().parse_completion(completion_ids, **kwargs)  # type: ignore[no-any-return]

    parser = Failing()
    session = parser.session()
    turn = session.next_prompt([USER])
    with pytest.raises(ZeroDivisionError):
        session.record(toys.letters("hi"))
    parser.fails = False
    assert session.next_prompt([USER]) is turn
    session.record(toys.letters("hi"))
    assert session.last_completion_ids.tolist() == toys.letters("hi")


@pytest.mark.parametrize("pending", [False, True])
def test_a_pickled_session_goes_on_where_it_was(toys: SimpleNamespace, pending: bool) -> None:
    session = answered(toys)
    conversation = [USER, session.answer, USER]
    if pending:
        session.next_prompt(conversation)
    again = pickle.loads(pickle.dumps(session))  # noqa: S301
    mine, theirs = session.next_prompt(conversation), again.next_prompt(conversation)
    assert theirs.prompt_ids.tolist() == mine.prompt_ids.tolist()
    assert not theirs.prompt_ids.flags.writeable
    again.record(toys.letters("b"))
    assert again.next_prompt([*conversation, again.answer, USER]).break_reason is None
    assert session.stats.turns == 1


def test_prompts_of_a_long_conversation_share_one_buffer(toys: SimpleNamespace) -> None:
    def held(turns: int) -> int:
        session = toys.BridgingParser().session()
        conversation = Messages([USER])
        prompts = []
        for _ in range(turns):
            prompts.append(session.next_prompt(conversation).prompt_ids)
            session.record(toys.letters("an answer of some length"))
            conversation.append(session.answer)
            conversation.append(USER)
        buffers = {id(p.base): p.base.nbytes for p in prompts}
        return sum(buffers.values())

    assert held(400) / held(100) < 6  # doubling buffers: between 3 and 6; copies: 16


def test_tokens_a_parser_renders_are_checked(toys: SimpleNamespace) -> None:
    class Wrong(toys.LetterParser):  # type: ignore[misc, name-defined]
        def render(self, messages: Any, **_: Any) -> Any:
            return [1, -1]

    session = Wrong().session()
    with pytest.raises(ValueError, match="between 0 and"):
        session.next_prompt([USER])
    assert session.stats.rendered == 0


def test_a_parser_cannot_change_the_tokens_it_is_given(toys: SimpleNamespace) -> None:
    class Meddling(toys.BridgingParser):  # type: ignore[misc, name-defined]
        def bridge_to_next_turn(self, prompt_ids: Any, completion_ids: Any, new_messages: Any, **_: Any) -> Any:
            prompt_ids[0] = 0

    session = Meddling().session()
    session.next_prompt([USER])
    session.record(toys.letters("a"))
    with pytest.raises(ValueError, match="read-only"):
        session.next_prompt([USER, session.answer, USER])


class TestParsedCompletion:
    CALLS = (
        ParsedToolCall(name="add", arguments=MappingProxyType({"x": 1}), raw="r"),
        ParsedToolCall(name=None, arguments=None, raw="broken", status="invalid_json"),
        ParsedToolCall(name="add", arguments={"s": "\ud800", "n": float("nan")}, raw="r", call_id="mine"),
    )

    def test_it_reads_like_a_dictionary(self) -> None:
        parsed = ParsedCompletion("text", reasoning="why")
        assert parsed["content"] == parsed.content == parsed.get("content")
        assert "tool_calls" in parsed
        assert parsed.get("nothing", 3) == 3
        with pytest.raises(KeyError):
            parsed["nothing"]
        assert dict(parsed).keys() == {"content", "reasoning", "tool_calls", "termination", "reasoning_complete"}
        assert len(parsed) == len(list(parsed)) == 5

    def test_only_good_calls_become_part_of_the_message(self) -> None:
        message = ParsedCompletion("t", reasoning="", tool_calls=self.CALLS).to_message(turn=3)
        assert [c["id"] for c in message["tool_calls"]] == ["call_3_0", "mine"]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"x": 1}
        assert message["reasoning_content"] == ""
        json.dumps(message).encode()

    def test_ids_are_equal_in_equal_runs_and_different_within_one(self, toys: SimpleNamespace) -> None:
        class Calling(toys.BridgingParser):  # type: ignore[misc, name-defined]
            def parse_completion(self, completion_ids: Any, **_: Any) -> ParsedCompletion:
                call = ParsedToolCall(name="f", arguments={}, raw="")
                return ParsedCompletion("", tool_calls=(call, call))

        def ids() -> list[str]:
            session = Calling().session()
            conversation = Messages([USER])
            for _ in range(3):
                session.next_prompt(conversation)
                session.record([150, 1])
                conversation += [session.answer, TOOL]
            return [call["id"] for m in conversation for call in m.get("tool_calls", ())]

        assert ids() == ids()
        assert len(set(ids())) == 6
        alone = ParsedCompletion("", tool_calls=self.CALLS[:1])
        assert alone.to_message()["tool_calls"][0]["id"] != alone.to_message()["tool_calls"][0]["id"]

    def test_what_a_model_says_can_always_be_a_message(self) -> None:
        call = ParsedToolCall(name="\udfff", arguments={}, raw="")
        message = ParsedCompletion("a\ud800", reasoning="\ud800", tool_calls=(call,)).to_message()
        json.dumps(message, ensure_ascii=False).encode()


def test_ids_differ() -> None:
    ids = [new_id() for _ in range(10_000)]
    assert len(set(ids)) == len(ids)
    assert np.char.isalnum(np.array(ids)).all()


def test_a_session_tells_what_was_sampled_from_all_else(toys: SimpleNamespace) -> None:
    session = toys.BridgingParser().session()
    assert session.segments == ()
    session.next_prompt([USER])
    session.record(toys.letters("hi", end=False))  # truncated: the bridge adds the closing token
    session.next_prompt([USER, session.answer, USER])
    (segment,) = session.segments
    assert segment.token_ids[segment.loss_mask].tolist() == toys.letters("hi", end=False)
    assert not segment.token_ids.flags.writeable
    session.record(toys.letters("there"))
    session.next_prompt([USER])
    session.record(toys.letters("new"))
    first, second = session.segments
    assert first.token_ids[first.loss_mask].tolist() == [*toys.letters("hi", end=False), *toys.letters("there")]
    assert second.token_ids.tolist() == [*toys.LetterParser().render([USER]), *toys.letters("new")]
    copied = pickle.loads(pickle.dumps(session))  # noqa: S301
    assert [s.token_ids.tolist() for s in copied.segments] == [s.token_ids.tolist() for s in session.segments]


def test_new_text_that_spells_control_tokens_is_counted_once(toys: SimpleNamespace) -> None:
    class Counting(toys.BridgingParser):  # type: ignore[misc, name-defined]
        def count_control_tokens(self, messages: Any) -> int:
            return sum(m["content"].count("!") for m in messages if m["role"] != "assistant")

    session = Counting().session()
    loud = {"role": "user", "content": "ask!!"}
    assert session.next_prompt([loud]).control_tokens == 2
    assert session.next_prompt([loud]).control_tokens == 2
    assert session.stats.control_tokens == 2
    session.record(toys.letters("hi"))
    tail = [{"role": "tool", "content": "!"}, USER]
    assert session.next_prompt([loud, session.answer, *tail]).control_tokens == 1
    session.discard()
    assert session.stats.control_tokens == 2
    assert session.next_prompt([loud, session.answer, *tail], tools=[{"name": "f"}]).control_tokens == 1
    assert session.stats.control_tokens == 3


def test_bridges_are_counted_and_timed(toys: SimpleNamespace) -> None:
    session = answered(toys)
    assert (session.stats.bridge_attempts, session.stats.bridged, session.stats.rendered) == (0, 0, 1)
    before = session.stats.prompt_seconds
    session.next_prompt([USER, session.answer, USER])
    assert (session.stats.bridge_attempts, session.stats.bridged, session.stats.rendered) == (1, 1, 1)
    assert session.stats.prompt_seconds > before > 0


def test_media_keep_their_places(toys: SimpleNamespace) -> None:
    class Seeing(toys.BridgingParser):  # type: ignore[misc, name-defined]
        def place_media(self, prompt_ids: Any, messages: Any, *, start: int = 0) -> tuple[PlacedMedia, ...]:
            found = [start + i for i, token in enumerate(prompt_ids[start:].tolist()) if token == 100 + ord("#")]
            assert len(found) == sum(m["content"].count("#") for m in messages)
            return tuple(PlacedMedia(sha256="0" * 64, kind="image", length_tokens=1, start=at) for at in found)

    session = Seeing().session()
    first = session.next_prompt([{"role": "user", "content": "#a"}])
    assert [piece.start for piece in first.media] == [1]
    assert first.prompt_ids[1] == 100 + ord("#")
    session.record(toys.letters("#"))  # a sampled placeholder is not an image
    second = session.next_prompt([{"role": "user", "content": "#a"}, session.answer, {"role": "user", "content": "b#"}])
    assert second.media[:1] == first.media
    assert [second.prompt_ids[piece.start] for piece in second.media] == [100 + ord("#")] * 2
    assert second.media[1].start > len(first.prompt_ids) + 2
    session.record(toys.letters("x"))
    broken = session.next_prompt([{"role": "user", "content": "#"}])
    assert [piece.start for piece in broken.media] == [1]
