"""Tests that conversations share their first prompt exactly as long as it is the same prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rllm_core.types import SampledMessage

USER = {"role": "user", "content": "ask"}


@pytest.fixture
def parser(toys: SimpleNamespace) -> Any:
    """A parser that keeps what it renders, in an array that it could write to later."""

    class Keeping(toys.BridgingParser):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.kept: list[Any] = []

        def render(self, messages: Any, **options: Any) -> Any:
            self.kept.append(np.array(super().render(messages, **options), np.int32))
            return self.kept[-1]

    return Keeping()


def test_rollouts_of_a_group_render_their_prompt_once_and_go_on_apart(parser: Any, toys: SimpleNamespace) -> None:
    sessions = [parser.session() for _ in range(3)]
    first = [session.next_prompt([dict(USER)]).prompt_ids.tolist() for session in sessions]
    assert len(parser.kept) == 1
    assert first == [parser.kept[0].tolist()] * 3
    parser.kept[0][:] = 0  # changes nothing: sessions have their own tokens
    for session, said in zip(sessions, "abc", strict=True):
        session.record(toys.letters(said))
    for session, said in zip(sessions, "abc", strict=True):
        turn = session.next_prompt([USER, session.answer, USER])
        assert turn.break_reason is None
        assert turn.prompt_ids.tolist()[: len(first[0]) + 2] == [*first[0], *toys.letters(said)]


def test_a_prompt_is_kept_only_while_a_conversation_has_it(parser: Any) -> None:
    parser.session().next_prompt([USER])
    session = parser.session()
    session.next_prompt([USER])
    assert len(parser.kept) == 2
    parser.session().next_prompt([USER])
    session.record([1])
    parser.session().next_prompt([USER])
    assert len(parser.kept) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([USER], [{"content": "ask", "role": "user"}]),
        ([{**USER, "name": 1}], [{**USER, "name": True}]),
        ([{**USER, "name": 0.0}], [{**USER, "name": -0.0}]),
        ([{**USER, "content": "['a']"}], [{**USER, "content": ["a"]}]),
        ([USER, USER], [USER]),
        ([USER], [SampledMessage(USER, ())]),
    ],
)
def test_prompts_that_a_template_may_write_differently_are_not_shared(parser: Any, one: Any, other: Any) -> None:
    sessions = [parser.session(), parser.session()]
    for session, messages in zip(sessions, (one, other), strict=True):
        session.next_prompt(messages)
    assert len(parser.kept) == 2


def test_tools_are_part_of_a_prompt(parser: Any) -> None:
    sessions = [parser.session(tools=tools) for tools in (None, [{"name": "f", "n": 1}], [{"name": "f", "n": True}])]
    lengths = [len(session.next_prompt([USER]).prompt_ids) for session in sessions]
    assert len(parser.kept) == 3
    assert lengths == [lengths[0], lengths[0] + 1, lengths[0] + 1]
