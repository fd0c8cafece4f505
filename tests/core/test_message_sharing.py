"""Tests that conversations with shared storage are recognized as continuations without a comparison."""

from __future__ import annotations

from rllm_core.types import Messages

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}


def test_a_conversation_goes_on_from_what_it_was() -> None:
    messages = Messages([USER])
    earlier = messages.view()
    messages.append(ANSWER)
    assert messages.goes_on_from(earlier)
    assert messages.view().goes_on_from(messages.view())
    assert not earlier.goes_on_from(messages.view()), "it lacks the answer"


def test_an_edited_conversation_has_to_be_compared() -> None:
    messages = Messages([USER])
    earlier = messages.view()
    messages[0] = {"role": "user", "content": "other"}
    messages.append(ANSWER)
    assert not messages.goes_on_from(earlier)


def test_two_that_branched_go_on_from_where_they_did_so_far_as_they_share() -> None:
    one = Messages([USER])
    start = one.view()
    other = one.copy()
    one.append(ANSWER)
    other.append({"role": "assistant", "content": "hey"})
    assert one.goes_on_from(start)
    assert not other.goes_on_from(one.view())
    assert list(other) == [USER, {"role": "assistant", "content": "hey"}]
