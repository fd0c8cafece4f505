from __future__ import annotations

import copy
import pickle
from threading import Thread

import numpy as np
import pytest
from pydantic import ValidationError
from rllm_renderers.chat_template import ChatTemplateConfig

from rllm_core.errors import RefusedConversation
from rllm_core.parser import Termination
from rllm_core.types import Messages, freeze, thaw, token_ids

ASK = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def ids_of(parser, text):
    return parser.tokenizer.encode(text, add_special_tokens=False)


# --------------------------------------------------------------------------------------------------------------------
# render


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_render_is_what_the_tokenizer_renders(parser, tools, add_generation_prompt):
    messages = [*ASK, {"role": "assistant", "content": "higher"}, {"role": "user", "content": "zwölf <b>&</b> 🦊"}]
    expected = parser.tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
    )
    for _ in range(2):
        assert parser.render(messages, tools=tools, add_generation_prompt=add_generation_prompt) == expected
    assert parser.render(Messages(messages), tools=tools, add_generation_prompt=add_generation_prompt) == expected


def test_a_rendering_can_be_changed_without_changing_the_next(parser):
    first = parser.render(ASK)
    first.append(7)
    assert parser.render(ASK) == first[:-1]


def test_equal_prompts_are_rendered_once(make_parser, monkeypatch):
    parser = make_parser()
    calls = []
    render = parser.template.rendered
    monkeypatch.setattr(
        parser.template, "rendered", lambda *args, **named: calls.append(args) or render(*args, **named)
    )
    for _ in range(16):
        parser.render(Messages(copy.deepcopy(ASK)))
    assert len(calls) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"content": "hello "},
        {"content": "hello", "name": "x"},
        {"content": "hello", "n": 1},
        {"content": "hello", "n": 1.0},
        {"content": "hello", "n": True},
        {"content": "hello", "n": "1"},
        {"content": "hello", "n": {"a": 1, "b": 2}},
        {"content": "hello", "n": {"b": 2, "a": 1}},
    ],
)
def test_prompts_that_differ_at_all_are_told_apart(make_parser, other):
    parser = make_parser("{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools }}{{ '<|im_end|>' }}")
    variants = [ASK, [{"role": "user", **other}]]
    for messages in variants:
        for tools in (None, [TOOL]):
            parser.render(messages, tools=tools)
            assert parser.render(messages, tools=tools) == ids_of(parser, parser.template.text(messages, tools))
    assert parser.render(variants[0]) != parser.render(variants[1]) or other == {"content": "hello"}


def test_arguments_of_tool_calls_are_given_to_the_template_as_data(make_parser):
    parser = make_parser(
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments.a + 1 if m.tool_calls else m.content }}<|im_end|>"
        "{% endfor %}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 41}'}}
    assert parser.template.text([{"role": "assistant", "content": "", "tool_calls": [call]}]) == "42<|im_end|>"


@pytest.mark.parametrize(
    "written",
    [
        "{% if c %}{{ '{' + c[0].function.arguments + '}' }}{% endif %}",
        "{% if c %}{{ '{' ~ c[0].function.arguments ~ '}' }}{% endif %}",
        "{% if c %}{{ '{' ~ (c[0].function.arguments | tojson) ~ '}' }}{% endif %}",
    ],
)
@pytest.mark.parametrize("content", ["", None])
@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}])
def test_calls_are_given_to_the_template_as_it_writes_them(make_parser, written, content, arguments):
    said = "{% if m.role == 'user' %}{{ m.content }}{% endif %}"
    turn = said + "{% set c = m.tool_calls %}" + written
    parser = make_parser("{% for m in messages %}" + turn + "<|im_end|>{% endfor %}")
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    message = {"role": "assistant", "content": content, "tool_calls": [call]}
    assert parser.template.text([message]) == '{{"a": "é"}}<|im_end|>'


def test_what_the_template_refuses_is_an_error(parser):
    with pytest.raises(RefusedConversation, match="does not accept this conversation: unknown role wizard"):
        parser.render([{"role": "wizard", "content": "hi"}])


def test_a_message_that_the_template_leaves_out_is_an_error(make_parser):
    written = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    some = make_parser("{% for m in messages %}{% if m.role == 'user' %}" + written + "{% endif %}{% endfor %}")
    for asked in (
        [{"role": "usr", "content": "hi"}],
        [*ASK, {"role": "usr", "content": [{"type": "text", "text": "hi"}]}],
    ):
        with pytest.raises(RefusedConversation, match="it leaves out messages of role 'usr'; use one of system, user"):
            some.render(asked)
    every = make_parser("{% for m in messages %}" + written + "{% endfor %}")
    assert every.tokenizer.decode(every.render([{"role": "usr", "content": "hi"}])) == "<|im_start|>usr\nhi<|im_end|>\n"


def test_variables_of_the_template(make_parser):
    thinking = make_parser(chat_template_kwargs={"thinking": True})
    assert thinking.render(ASK) == make_parser().render(ASK) + ids_of(thinking, "<think>\n")
    with pytest.raises(ValidationError, match="'tools' is set by the parser"):
        ChatTemplateConfig(chat_template_kwargs={"tools": []})


# --------------------------------------------------------------------------------------------------------------------
# parse


def test_a_completion_ends_at_its_first_stop_token(parser):
    end, text_end = parser.get_stop_token_ids()
    abc = ids_of(parser, "hello")
    for ids, termination in (
        ([*abc, end], Termination.STOP),
        ([*abc, text_end], Termination.STOP),
        ([*abc, end, *abc, end], Termination.STOP),
        (abc, Termination.TRUNCATED),
    ):
        for completion in (ids, token_ids(ids), np.array(ids, np.int64)):
            parsed = parser.parse_completion(completion)
            assert (parsed.content, parsed.termination) == ("hello", termination)
    assert parser.parse_completion([end]).content == ""
    assert parser.parse_completion([]).termination is Termination.TRUNCATED


def test_tags_are_read_from_tokens(parser):
    text = '<think>\nwhy\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    parsed = parser.parse_completion(ids_of(parser, text), tools=[TOOL])
    assert (parsed.reasoning, parsed.content, parsed.ok_tool_calls[0].arguments) == ("why", "", {"a": 1})
    assert parser.parse_completion(ids_of(parser, text)).tool_calls[0].status == "ok"
    other = {"name": "other", "parameters": {}}
    assert parser.parse_completion(ids_of(parser, text), tools=[other]).tool_calls[0].status == "unknown_tool"


def test_nothing_sampled_vanishes_from_the_text(parser):
    start, end = ids_of(parser, "<|im_start|>")[0], parser.get_stop_token_ids()[0]
    ab, cd = ids_of(parser, "ab"), ids_of(parser, "cd")
    unknown = len(parser.tokenizer) + 5
    assert parser.parse_completion([*ab, start, *cd, end]).content == "ab<|im_start|>cd"
    assert parser.parse_completion([*ab, unknown, unknown, *cd, end]).content == "ab\ufffd\ufffdcd"
    assert parser.parse_completion([2**31 - 1] * 5000).content == "\ufffd" * 5000
    half = ids_of(parser, "ß")[0]
    assert parser.parse_completion([half, end]).content == "\ufffd"


def test_reasoning_opened_by_the_prompt(make_parser):
    parser = make_parser(chat_template_kwargs={"thinking": True})
    prompt, completion = parser.render(ASK), ids_of(parser, "why</think>so<|im_end|>")
    assert parser.parse_completion(completion, prompt_ids=prompt).reasoning == "why"
    assert parser.parse_completion(completion).reasoning is None
    assert parser.parse_completion(completion, prompt_ids=token_ids(prompt)).content == "so"
    closed = [*prompt, *ids_of(parser, "\n</think>\n\n")]
    assert parser.parse_completion(completion, prompt_ids=closed).reasoning is None
    quoted = make_parser().render([{"role": "user", "content": "what is <think>"}])
    assert parser.parse_completion(completion, prompt_ids=quoted).reasoning is None


# --------------------------------------------------------------------------------------------------------------------
# pickle, threads, arguments


def test_a_pickled_parser_is_the_same_parser(parser):
    parser.render(ASK)
    again = pickle.loads(pickle.dumps(parser))  # noqa: S301
    completion = ids_of(parser, "higher<|im_end|>")
    tail = [{"role": "user", "content": "next"}]
    assert again.config == parser.config
    assert again.bridged_tails == parser.bridged_tails
    assert again.get_stop_token_ids() == parser.get_stop_token_ids()
    assert again.render(ASK, tools=[TOOL]) == parser.render(ASK, tools=[TOOL])
    assert again.parse_completion(completion) == parser.parse_completion(completion)
    prompt = parser.render(ASK)
    bridged = parser.bridge_to_next_turn(prompt, completion, tail)
    assert again.bridge_to_next_turn(prompt, completion, tail).tolist() == bridged.tolist()


def test_threads_get_what_one_thread_gets(make_parser):
    conversations = [[{"role": "user", "content": f"what is {number}?"}] for number in range(60)]
    reference = make_parser()
    expected = [
        (
            reference.render(m),
            reference.parse_completion(ids_of(reference, f"it is {len(m)}<|im_end|>")),
            reference.bridge_to_next_turn(reference.render(m), ids_of(reference, "ok<|im_end|>"), m).tolist(),
        )
        for m in conversations
    ]
    shared, wrong = make_parser(), []

    def work(offset):
        for step in range(len(conversations)):
            at = (step * 7 + offset) % len(conversations)
            messages = conversations[at]
            found = (
                shared.render(messages),
                shared.parse_completion(ids_of(shared, f"it is {len(messages)}<|im_end|>")),
                shared.bridge_to_next_turn(shared.render(messages), ids_of(shared, "ok<|im_end|>"), messages).tolist(),
            )
            if found != expected[at]:
                wrong.append(at)

    threads = [Thread(target=work, args=(offset,)) for offset in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_arguments_are_never_changed(parser):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    tools, before = [TOOL], copy.deepcopy([messages, [TOOL]])
    parser.render(messages, tools=tools)
    parser.bridge_to_next_turn(parser.render(ASK), ids_of(parser, "x<|im_end|>"), messages[2:], tools=tools)
    assert [messages, tools] == before
    frozen = freeze(messages)
    assert parser.render(frozen, tools=freeze(tools)) == parser.render(thaw(frozen), tools=tools)
