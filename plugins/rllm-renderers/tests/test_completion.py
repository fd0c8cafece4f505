from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rllm_renderers.formats import FORMATS

from rllm_core.parser import Termination

read = FORMATS["hermes"].read
STOP, TRUNCATED, MALFORMED = Termination.STOP, Termination.TRUNCATED, Termination.MALFORMED


def call(inside):
    return f"<tool_call>{inside}</tool_call>"


@pytest.mark.parametrize("text", ["", "hello", "  spaces stay \n", "a < b > c", "</think>", "</tool_call> alone"])
def test_plain_text_is_its_own_content(text):
    for stopped, termination in ((True, STOP), (False, TRUNCATED)):
        parsed = read(text, stopped=stopped)
        assert (parsed.content, parsed.reasoning, parsed.tool_calls) == (text, None, ())
        assert (parsed.termination, parsed.reasoning_complete) == (termination, None)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "complete"),
    [
        ("<think>why</think>so", "why", "so", True),
        ("\n <think>\nwhy\n</think>\n\nso ", "why", "so", True),
        ("<think></think>so", "", "so", True),
        ("<think>why", "why", "", False),
        ("<think>", "", "", False),
        ("<think>a</think>b</think>c", "a", "b</think>c", True),
        ("<think>a<think>b</think>c", "a<think>b", "c", True),
        ("so <think>late</think>", None, "so <think>late</think>", None),
    ],
)
def test_reasoning(text, reasoning, content, complete):
    parsed = read(text, stopped=True)
    assert (parsed.reasoning, parsed.content, parsed.reasoning_complete) == (reasoning, content, complete)
    assert parsed.termination is (MALFORMED if complete is False else STOP)
    assert read(text, stopped=False).termination is TRUNCATED


def test_reasoning_that_the_prompt_opened():
    parsed = read("why</think>so", stopped=True, opened_by_prompt="<think>")
    assert (parsed.reasoning, parsed.content, parsed.reasoning_complete) == ("why", "so", True)
    parsed = read("<think>again</think>so", stopped=True, opened_by_prompt="<think>")
    assert (parsed.reasoning, parsed.content) == ("again", "so")
    parsed = read("why so", stopped=True, opened_by_prompt="<think>")
    assert (parsed.reasoning, parsed.content, parsed.termination) == ("why so", "", MALFORMED)


def test_a_tool_call_ends_reasoning():
    inside = '{"name": "f", "arguments": {"text": "</think>"}}'
    parsed = read(f"<think>hm{call(inside)}</think>", stopped=True)
    assert (parsed.reasoning, parsed.content, parsed.reasoning_complete) == ("hm", "</think>", True)
    assert [c.arguments for c in parsed.ok_tool_calls] == [{"text": "</think>"}]
    assert parsed.termination is STOP


@pytest.mark.parametrize(
    ("inside", "name", "arguments", "status"),
    [
        ('{"name": "f", "arguments": {"a": 1, "b": [true, null, "x"]}}', "f", {"a": 1, "b": [True, None, "x"]}, "ok"),
        ('\n{"arguments":{"a":1.50},"name":"f"}\n', "f", {"a": 1.5}, "ok"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', "f", {"a": 1}, "ok"),
        ('{"name": "f"}', "f", {}, "ok"),
        ('{"name": "f", "arguments": {"s": "\\u00e9"}}', "f", {"s": "é"}, "ok"),
        ('{"name": "g", "arguments": {}}', "g", {}, "unknown_tool"),
        ('{"name": "f", "arguments": {}', None, None, "invalid_json"),
        ("", None, None, "invalid_json"),
        ("f(1)", None, None, "invalid_json"),
        ('{"name": "f", "arguments": {"a": NaN}}', None, None, "invalid_json"),
        ('{"name": "f", "arguments": {"a": 1e999}}', None, None, "invalid_json"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', None, None, "invalid_json"),
        ('{"name": "f", "arguments": "not json"}', "f", None, "invalid_json"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", None, None, "invalid_json"),
        ("[" * 100_000, None, None, "invalid_json"),
        ("[" * 90_000 + "]" * 90_000, None, None, "invalid_json"),
        ('["f", {}]', None, None, "malformed_structure"),
        ("3", None, None, "malformed_structure"),
        ('{"name": "f", "arguments": [1]}', "f", None, "malformed_structure"),
        ('{"name": "f", "arguments": null}', "f", None, "malformed_structure"),
        ('{"arguments": {}}', None, None, "missing_name"),
        ('{"name": "", "arguments": {}}', None, None, "missing_name"),
        ('{"name": 3, "arguments": {}}', None, None, "missing_name"),
    ],
)
def test_tool_calls(inside, name, arguments, status):
    parsed = read(f"I call {call(inside)} now", stopped=True, schemas={"f": {}})
    [found] = parsed.tool_calls
    assert (found.name, found.arguments, found.status, found.raw) == (name, arguments, status, call(inside))
    assert len(parsed.ok_tool_calls) == (status == "ok")
    assert parsed.content == "I call  now"
    assert parsed.termination is STOP


def test_several_calls_and_text_between_them():
    good = call('{"name": "f", "arguments": {}}')
    parsed = read(f"one {good}two{call('!')}{good} three", stopped=True)
    assert [c.status for c in parsed.tool_calls] == ["ok", "invalid_json", "ok"]
    assert parsed.content == "one two three"


def test_a_call_that_never_closes():
    good = call('{"name": "f", "arguments": {}}')
    parsed = read('<tool_call>{"name": ' + good + "<tool_call>{", stopped=True)
    assert [c.status for c in parsed.tool_calls] == ["unclosed_block", "ok", "unclosed_block"]
    assert "".join(c.raw for c in parsed.tool_calls) == '<tool_call>{"name": ' + good + "<tool_call>{"
    assert parsed.termination is MALFORMED
    assert read("<tool_call>{", stopped=False).termination is TRUNCATED


def test_arguments_cannot_be_changed():
    parsed = read(call('{"name": "f", "arguments": {"a": [1]}}'), stopped=True)
    with pytest.raises(TypeError, match="frozen"):
        parsed.tool_calls[0].arguments["a"] = 2
    with pytest.raises(TypeError, match="frozen"):
        parsed.tool_calls[0].arguments["a"].append(2)


TAGS = ("<think>", "</think>")
PIECES = [*TAGS, "<tool_call>", "</tool_call>", '{"name": "f"', ', "arguments": {}}', "{}", "\n", "text", "\0"]


def letters(text):
    for tag in TAGS:
        text = text.replace(tag, "")
    return sorted("".join(text.split()))


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12).map("".join), st.booleans(), st.booleans())
def test_nothing_a_model_writes_raises_or_vanishes(text, stopped, opened):
    parsed = read(text, stopped=stopped, opened_by_prompt="<think>" if opened else "")
    assert (parsed.termination is TRUNCATED) == (not stopped)
    assert (parsed.reasoning is None) == (parsed.reasoning_complete is None)
    assert parsed.to_message(turn=1)["role"] == "assistant"
    shown = [parsed.content, parsed.reasoning or "", *(c.raw for c in parsed.tool_calls)]
    assert letters("\n".join(shown)) == letters(text)
