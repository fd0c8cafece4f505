"""Tests that `Messages` works like a list of dictionaries, and that a step's messages never change."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm_core.messages import MAX_DEPTH, FrozenDict, FrozenList, Messages, MessageView, freeze, snapshot, thaw
from rllm_core.types import Step, message, well_formed

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}
TOOL = {"role": "tool", "content": "42", "tool_call_id": "a:b"}
SYSTEM = {"role": "system", "content": "be kind"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
some_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
    optional={"content": st.none() | st.text(), "extra": json_values},
)


def edits() -> dict[str, Callable[[Any], Any]]:
    return {
        "append": lambda m: m.append(TOOL),
        "extend": lambda m: m.extend([TOOL, USER]),
        "extend_itself": lambda m: m.extend(m),
        "insert_first": lambda m: m.insert(0, SYSTEM),
        "insert_negative": lambda m: m.insert(-1, SYSTEM),
        "insert_past_the_end": lambda m: m.insert(99, SYSTEM),
        "pop": lambda m: m.pop(),
        "pop_first": lambda m: m.pop(0),
        "remove": lambda m: m.remove(ANSWER),
        "replace": lambda m: m.__setitem__(0, SYSTEM),
        "replace_last": lambda m: m.__setitem__(-1, SYSTEM),
        "replace_slice": lambda m: m.__setitem__(slice(0, 2), [SYSTEM]),
        "replace_every_other": lambda m: m.__setitem__(slice(None, None, 2), [SYSTEM, TOOL]),
        "delete": lambda m: m.__delitem__(1),
        "delete_slice": lambda m: m.__delitem__(slice(1, None)),
        "delete_negative_step": lambda m: m.__delitem__(slice(None, None, -2)),
        "reverse": lambda m: m.reverse(),
        "clear": lambda m: m.clear(),
        "add_in_place": lambda m: m.__iadd__([TOOL]),
        "compact": lambda m: m.__setitem__(slice(None), m[-1:]),
    }


@pytest.mark.parametrize("name", edits())
def test_edits_as_a_list_does_and_leaves_earlier_views_alone(name: str) -> None:
    edit = edits()[name]
    plain: list[dict[str, Any]] = [USER, ANSWER, TOOL]
    messages = Messages(plain)
    seen, seen_plain = messages.view(), list(plain)
    step = Step(messages=messages, prompt_ids=[1], completion_ids=[2])

    assert edit(messages) == edit(plain)

    assert list(messages) == plain
    assert messages == plain
    assert messages.view() == plain
    assert seen == seen_plain
    assert step.messages == seen_plain


@pytest.mark.parametrize(
    "read",
    [
        len,
        bool,
        lambda m: m[0],
        lambda m: m[-1],
        lambda m: m[1:],
        lambda m: m[::-1],
        lambda m: m[-2:5],
        lambda m: list(reversed(m)),
        lambda m: USER in m,
        lambda m: {"role": "user"} in m,
        lambda m: m.index(ANSWER),
        lambda m: m.count(USER),
        lambda m: [x["role"] for x in m],
        lambda m: json.dumps(list(m)),
        lambda m: list(m + [TOOL]),  # noqa: RUF005 - the operator is what is tested
        lambda m: list([TOOL] + m),  # noqa: RUF005
        lambda m: m == [USER, ANSWER],
        lambda m: [USER, ANSWER] == m,  # noqa: SIM300
        lambda m: m != [USER],
        lambda m: m == (USER, ANSWER),
        lambda m: m == "no",
        lambda m: list(m.copy()),
        lambda m: list(copy.copy(m)),
        lambda m: list(copy.deepcopy(m)),
        lambda m: list(pickle.loads(pickle.dumps(m))),  # noqa: S301 - written one call earlier
        lambda m: dict(m[0]) | {"name": "x"},
        lambda m: [{**x, "seen": True} for x in m],
    ],
)
def test_reads_as_a_list_does(read: Callable[[Any], Any]) -> None:
    plain = [USER, ANSWER]
    assert read(Messages(plain)) == read(plain)


def test_an_empty_conversation_is_false_and_equals_an_empty_list() -> None:
    assert not Messages()
    assert Messages() == []
    assert Messages([USER])


@pytest.mark.parametrize("index", [2, -3])
def test_an_index_outside_is_an_error(index: int) -> None:
    messages = Messages([USER, ANSWER])
    with pytest.raises(IndexError):
        messages[index]
    with pytest.raises(IndexError):
        messages[index] = TOOL
    with pytest.raises(IndexError):
        messages.pop(index)
    assert messages == [USER, ANSWER]


def test_a_message_in_a_conversation_is_frozen_and_says_what_to_do() -> None:
    messages = Messages([{"role": "user", "content": [{"type": "text", "text": "hi"}], "tool_calls": []}])
    for change in (
        lambda: messages[0].__setitem__("content", "x"),
        lambda: messages[0].update(content="x"),
        lambda: messages[0].setdefault("name", "x"),
        lambda: messages[0].pop("content"),
        lambda: messages[0].clear(),
        lambda: messages[0]["content"].append({}),
        lambda: messages[0]["content"].sort(),
        lambda: messages[0]["content"][0].__setitem__("text", "x"),
        lambda: messages[0]["content"].__iadd__([1]),
        lambda: messages[0].__ior__({"a": 1}),
    ):
        with pytest.raises(TypeError, match=r"replace the whole message \(messages\[i\] = \{\.\.\.\}\)"):
            change()
    messages[0] = {**messages[0], "content": "x"}
    assert messages == [{"role": "user", "content": "x", "tool_calls": []}]


def test_the_authors_own_dictionaries_may_change_afterwards() -> None:
    part = {"type": "text", "text": "before"}
    mine = {"role": "user", "content": [part]}
    messages = Messages([mine])
    part["text"] = mine["role"] = "after"
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "before"}]}]


def test_a_deep_copy_of_a_message_may_be_edited_and_a_pickled_one_is_frozen_again() -> None:
    original = message({"role": "user", "content": [{"type": "text", "text": "a"}]})
    editable = copy.deepcopy(original)
    editable["content"][0]["text"] = "b"
    assert original["content"][0]["text"] == "a"
    assert type(editable) is dict
    assert type(editable["content"]) is list
    again = pickle.loads(pickle.dumps(original))  # noqa: S301
    assert again == original
    assert type(again) is FrozenDict
    assert type(again["content"]) is FrozenList
    assert type(again["content"][0]) is FrozenDict
    assert type(copy.copy(original)) is dict
    assert type(copy.copy(original["content"])) is list


def test_two_conversations_that_go_on_from_one_do_not_see_each_other() -> None:
    left = Messages([USER])
    right = left.copy()
    view = left.view()
    left.append(ANSWER)
    right.append(TOOL)
    right.append(USER)
    left.append(SYSTEM)
    assert left == [USER, ANSWER, SYSTEM]
    assert right == [USER, TOOL, USER]
    assert view == [USER]
    assert view.extended([SYSTEM]) == [USER, SYSTEM]
    assert left == [USER, ANSWER, SYSTEM]


def test_conversations_that_branch_in_threads_do_not_see_each_other() -> None:
    for _ in range(100):
        shared = Messages([USER])
        branches = [shared.copy() for _ in range(4)]
        barrier = threading.Barrier(len(branches))

        def go_on(branch: Messages, name: str, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            for turn in range(5):
                branch.append({"role": "user", "content": f"{name}{turn}"})

        threads = [threading.Thread(target=go_on, args=(b, str(i))) for i, b in enumerate(branches)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, branch in enumerate(branches):
            assert [m["content"] for m in branch] == ["hi", *(f"{i}{turn}" for turn in range(5))]


@given(st.lists(some_messages, max_size=6), st.lists(some_messages, max_size=3))
def test_a_snapshot_equals_the_list_and_shares_what_it_can(said: list[Any], more: list[Any]) -> None:
    previous = MessageView(said)
    grown = snapshot([*said, *more], previous)
    assert grown == said + more
    assert previous == said
    assert all(grown[i] is previous[i] for i in range(len(said)))


def test_a_snapshot_does_not_mistake_one_for_true() -> None:
    previous = MessageView([{"role": "user", "n": 1}])
    assert json.dumps(list(snapshot([{"role": "user", "n": True}], previous))) == '[{"role": "user", "n": true}]'


def test_a_snapshot_of_an_edited_list_is_what_the_list_is_now() -> None:
    previous = MessageView([USER, ANSWER])
    assert snapshot([SYSTEM, ANSWER, TOOL], previous) == [SYSTEM, ANSWER, TOOL]
    assert snapshot([USER], previous) == [USER]
    messages = Messages(previous)
    messages[0] = SYSTEM
    assert snapshot(messages, previous) == [SYSTEM, ANSWER]
    assert previous == [USER, ANSWER]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"content": "x"}, "needs a role"),
        ({"role": ""}, "needs a role"),
        ({"role": 3}, "needs a role"),
        ({"role": "user", "content": 3}, "content must be text, a list of parts or None, got int"),
        ({"role": "user", "content": {"text": "x"}}, "got dict"),
        ("hello", "a message is a dictionary with a role, got str"),
        (None, "got NoneType"),
        ({"role": "user", "content": "\ud800"}, "half a surrogate pair"),
        ({"role": "user", "content": "x", "score": float("nan")}, "nan cannot be written as JSON"),
        ({"role": "user", "content": "x", 3: 4}, "keys must be strings"),
        ({"role": "user", "content": "x", "raw": b"bytes"}, "bytes is not JSON data"),
        ({"role": "user", "content": [{"a": object()}]}, "object is not JSON data"),
        (FrozenDict({"content": "x"}), "needs a role"),
    ],
)
def test_what_is_no_message_is_refused_and_changes_nothing(value: Any, error: str) -> None:
    messages = Messages([USER])
    for attempt in (
        lambda: messages.append(value),
        lambda: messages.insert(0, value),
        lambda: messages.__setitem__(0, value),
        lambda: messages.__setitem__(slice(0, 1), [value]),
        lambda: Messages([value]),
    ):
        with pytest.raises(ValueError, match=error):
            attempt()
    assert messages == [USER]


@pytest.mark.parametrize("value", [USER, "hello", 3, None])
def test_a_conversation_is_a_list(value: Any) -> None:
    with pytest.raises(ValueError, match="a conversation is a list of messages, got"):
        MessageView(value)
    with pytest.raises(ValueError, match="a conversation is a list of messages, got"):
        snapshot(value, MessageView([USER]))


@given(json_values)
def test_freezing_and_thawing_lose_nothing(value: Any) -> None:
    frozen = freeze(value)
    assert frozen == value
    assert json.dumps(frozen) == json.dumps(value)
    thawed = thaw(frozen)
    assert json.dumps(thawed) == json.dumps(value)
    assert not isinstance(thawed, FrozenDict | FrozenList)


def test_enumerations_become_the_text_and_number_they_stand_for() -> None:
    class Role(str, Enum):  # noqa: UP042 - the older spelling is what is tested
        USER = "user"

    class Kind(StrEnum):
        TEXT = "text"

    assert freeze({Role.USER: Kind.TEXT}) == {"user": "text"}
    assert json.dumps(freeze([Role.USER, Kind.TEXT])) == '["user", "text"]'
    assert type(freeze(Role.USER)) is str


def test_nesting_without_end_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} levels"):
        freeze(cycle)


@pytest.mark.parametrize("text", ["", "plain", "é😀", "\x00"])
def test_text_is_kept_as_it_is(text: str) -> None:
    assert well_formed(text) == text
    assert freeze(text) == text


@pytest.mark.parametrize("text", ["\ud83d", "a\udcffb"])
def test_half_a_surrogate_pair_is_refused_and_can_be_spelt_out(text: str) -> None:
    with pytest.raises(ValueError, match="half a surrogate pair"):
        freeze(text)
    repaired = well_formed(text)
    assert "\\ud" in repaired
    assert repaired.encode().decode() == freeze(repaired) == repaired
