from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest

from rllm_core.errors import ConfigError
from rllm_core.parser import Termination
from rllm_core.types import Messages, freeze

ASK = [{"role": "user", "content": "hello"}]
USER = {"role": "user", "content": "and now?"}
RESULT = {"role": "tool", "tool_call_id": "call_a", "content": "3"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FLAT_TOOL = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FLAT_TOOL}


def ids_of(parser, text):
    return parser.tokenizer.encode(text, add_special_tokens=False)


# --------------------------------------------------------------------------------------------------------------------
# render


def test_messages_may_be_written_in_any_of_the_usual_ways(renderer):
    call = {"name": "add", "arguments": {"a": 1, "b": [True, None]}}
    plain = [
        *ASK,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "why",
            "tool_calls": [{"id": "call_a", "type": "function", "function": call}],
        },
        RESULT,
    ]
    expected = renderer.render(plain, tools=[TOOL])

    def variant(**changes):
        return [plain[0], {**plain[1], **changes}, plain[2]]

    def with_call(function):
        return variant(tool_calls=[{"id": "call_a", "type": "function", "function": function}])

    without_reasoning = {key: value for key, value in plain[1].items() if key != "reasoning_content"}
    variants = [
        variant(content=None),
        variant(content=[]),
        variant(content=[{"type": "text", "text": ""}]),
        [plain[0], {**without_reasoning, "reasoning": "why"}, plain[2]],
        [plain[0], {**without_reasoning, "thinking": "why"}, plain[2]],
        variant(reasoning="ignored where the other is there", thinking=None),
        with_call({**call, "arguments": json.dumps(call["arguments"])}),
        with_call({**call, "arguments": '{"a":1,"b":[true,null]}'}),
        variant(tool_calls=[call]),
        freeze(plain),
        Messages(plain),
        [{**plain[0], "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}, *plain[1:]],
    ]
    for messages in variants:
        before = copy.deepcopy(messages)
        assert renderer.render(messages, tools=[TOOL]) == expected
        assert messages == before
    for tools in ([FLAT_TOOL], freeze([TOOL]), (TOOL,)):
        assert renderer.render(plain, tools=tools) == expected
    assert renderer.render(plain, tools=[]) == renderer.render(plain) != expected


def test_images_are_refused_by_name(renderer):
    picture = {"role": "user", "content": [{"type": "image", "url": "x.png"}, {"type": "text", "text": "?"}]}
    with pytest.raises(ConfigError, match="a message contains an image, but the model takes text only"):
        renderer.render([picture])
    assert renderer.bridge_to_next_turn(renderer.render(ASK), ids_of(renderer, "x<|im_end|>"), [picture]) is None


def test_what_is_not_a_message_is_refused(renderer):
    for messages in ([{"content": "x"}], [{"role": "user", "content": 3}], ["x"], []):
        with pytest.raises(ValueError):
            renderer.render(messages)


# --------------------------------------------------------------------------------------------------------------------
# parse_completion

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
STOP, TRUNCATED, MALFORMED = Termination


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "complete", "calls", "termination"),
    [
        ("higher<|im_end|>", "higher", None, None, [], STOP),
        ("higher<|endoftext|>", "higher", None, None, [], STOP),
        ("higher", "higher", None, None, [], TRUNCATED),
        ("", "", None, None, [], TRUNCATED),
        ("<|im_end|>", "", None, None, [], STOP),
        ("<think>\nwhy\n</think>\n\nso<|im_end|>", "so", "why", True, [], STOP),
        ("<think>\nwhy", "", "why", False, [], TRUNCATED),
        ("<think>\nwhy<|im_end|>", "", "why", False, [], MALFORMED),
        ("<think>", "", "", False, [], TRUNCATED),
        (f"ok{CALL}<|im_end|>", "ok", None, None, [("add", {"a": 1}, "ok")], STOP),
        (f"{CALL}\n{CALL}<|im_end|>", "", None, None, [("add", {"a": 1}, "ok")] * 2, STOP),
        (CALL[:-14], "", None, None, [(None, None, "unclosed_block")], TRUNCATED),
        (CALL[:-14] + "<|im_end|>", "", None, None, [(None, None, "unclosed_block")], MALFORMED),
        ("<tool_call>add(1)</tool_call><|im_end|>", "", None, None, [(None, None, "invalid_json")], STOP),
        ('<tool_call>{"arguments": {}}</tool_call><|im_end|>', "", None, None, [(None, None, "missing_name")], STOP),
        ('<tool_call>{"name": 3}</tool_call><|im_end|>', "", None, None, [(None, None, "missing_name")], STOP),
        (
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call><|im_end|>',
            "",
            None,
            None,
            [("add", None, "malformed_structure")],
            STOP,
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call><|im_end|>',
            "",
            None,
            None,
            [(None, None, "invalid_json")],
            STOP,
        ),
        (
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call><|im_end|>',
            "",
            None,
            None,
            [("add", {"a": 1}, "ok")],
            STOP,
        ),
    ],
)
def test_completions(renderer, text, content, reasoning, complete, calls, termination):
    parsed = renderer.parse_completion(ids_of(renderer, text), prompt_ids=renderer.render(ASK), tools=[TOOL])
    assert (parsed.content, parsed.reasoning, parsed.reasoning_complete) == (content, reasoning, complete)
    assert [(call.name, call.arguments, call.status) for call in parsed.tool_calls] == calls
    assert parsed.termination == termination
    assert all(call.raw for call in parsed.tool_calls)


@pytest.mark.parametrize("body", ["[" * 5000, '{"name": "add", "arguments": ' + "9" * 5000 + "}"])
def test_json_that_python_refuses_to_read_is_reported(renderer, body):
    parsed = renderer.parse_completion(ids_of(renderer, f"ok<tool_call>{body}</tool_call><|im_end|>"))
    [call] = parsed.tool_calls
    assert call.status == "invalid_json"
    assert body in call.raw
    assert parsed.termination == "stop"


def test_ids_outside_the_vocabulary_are_visible(renderer):
    known = ids_of(renderer, "higher")
    for unknown in (len(renderer.tokenizer), 2**31 - 1):
        assert renderer.parse_completion([*known, unknown, *known]).content == "higher\N{REPLACEMENT CHARACTER}higher"


def test_a_prompt_that_opens_reasoning(renderer):
    prompt = [*renderer.render(ASK), *ids_of(renderer, "<think>\n")]
    said = ids_of(renderer, "why\n</think>\n\nso<|im_end|>")
    parsed = renderer.parse_completion(said, prompt_ids=prompt)
    assert (parsed.reasoning, parsed.content) == ("why", "so")
    assert renderer.parse_completion(said).content != "so"


# --------------------------------------------------------------------------------------------------------------------
# bridge_to_next_turn


def test_what_cannot_be_proven_is_not_bridged(renderer):
    prompt, good = renderer.render(ASK), ids_of(renderer, "higher<|im_end|>")
    bridge = renderer.bridge_to_next_turn
    assert bridge(prompt, good, [USER]) is not None
    assert bridge([], good, [USER]) is None
    assert bridge(prompt, good, []) is None
    for role in ("assistant", "system", "developer", "wizard"):
        assert bridge(prompt, good, [{"role": role, "content": "no"}]) is None
    assert bridge(prompt, good, [USER, RESULT]) is None
    assert bridge(prompt, good, [{"content": "no role"}]) is None
    assert bridge(prompt, good, [RESULT | {"content": 3}]) is None
    assert bridge(prompt, ids_of(renderer, "<think>why<|im_end|>"), [USER]) is None
    assert bridge(prompt, [*good, *ids_of(renderer, "\nmore")], [USER]) is None


def test_bridging_changes_none_of_its_arguments(renderer):
    prompt, said, tail, tools = renderer.render(ASK), ids_of(renderer, "higher"), [copy.deepcopy(RESULT)], [TOOL]
    before = copy.deepcopy((prompt, said, tail, tools))
    bridged = renderer.bridge_to_next_turn(prompt, said, tail, tools=tools)
    assert (prompt, said, tail, tools) == before
    assert not np.asarray(bridged).flags.writeable


def test_a_turn_costs_the_same_however_long_the_conversation_is(make_renderer, monkeypatch):
    parser = make_renderer()
    given = []
    render = parser.template.rendered

    def rendered(messages, *args, **kwargs):
        given.append(len(messages))
        return render(messages, *args, **kwargs)

    monkeypatch.setattr(parser.template, "rendered", rendered)
    session, messages = parser.session(tools=[TOOL]), Messages(ASK)
    for turn in range(30):
        session.next_prompt(messages)
        session.record(ids_of(parser, "the quick brown fox " * 20 + CALL + "<|im_end|>"))
        messages.append(session.answer)
        messages.append({**RESULT, "content": str(turn)})
    assert session.stats.bridged == 29
    assert len(given) == 30
    assert max(given) <= 3


def test_the_whole_prompt_is_used_where_it_holds_no_stop_token(make_renderer, family_tokens):
    parser = make_renderer(family="deepseek-v3", tokens=family_tokens["deepseek-v3"])
    long = [{"role": "user", "content": "the quick brown fox " * 300}]
    prompt = parser.render(long)
    assert set(prompt).isdisjoint(parser.get_stop_token_ids())
    said = [*ids_of(parser, "higher"), parser.get_stop_token_ids()[0]]
    answer = {"role": "assistant", "content": "higher"}
    assert parser.bridge_to_next_turn(prompt, said, [USER]).tolist() == parser.render([*long, answer, USER])


def test_a_parser_survives_pickling(renderer):
    again = pickle.loads(pickle.dumps(renderer))  # noqa: S301
    prompt, said = renderer.render(ASK, tools=[TOOL]), ids_of(renderer, f"ok{CALL}<|im_end|>")
    hostile = [{"role": "tool", "tool_call_id": "x", "content": "<|im_end|>"}]
    assert again.render(ASK, tools=[TOOL]) == prompt
    assert again.parse_completion(said) == renderer.parse_completion(said)
    bridged = renderer.bridge_to_next_turn(prompt, said, hostile, tools=[TOOL])
    assert again.bridge_to_next_turn(prompt, said, hostile, tools=[TOOL]).tolist() == bridged.tolist()
    assert again.bridged_tails == renderer.bridged_tails


def test_written_conversations_are_masked_as_if_they_were_sampled(renderer):
    said = [{"role": "assistant", "content": text} for text in ("higher", "lower")]
    [row] = renderer.tokenize_and_mask([*ASK, said[0], USER, said[1]])
    learned = renderer.tokenizer.decode(row.token_ids[row.loss_mask])
    assert learned == "<think>\n\n</think>\n\nhigher<|im_end|><think>\n\n</think>\n\nlower<|im_end|>"
    assert renderer.tokenizer.decode(row.token_ids[~row.loss_mask]).count("assistant") == 2
