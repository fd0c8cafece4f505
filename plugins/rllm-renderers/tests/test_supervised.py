"""Supervised data through a chat template: rows as in rollouts, and transformers' own mask."""

from __future__ import annotations

import pytest

from rllm_core.errors import ConfigError
from rllm_core.types import Messages

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call_7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CONVERSATION = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "", "reasoning_content": "I see", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_7", "content": "3 <|im_end|>"},
    {"role": "assistant", "content": "three", "reasoning_content": "so"},
    {"role": "user", "content": "higher"},
    {"role": "assistant", "content": "four"},
]
SAID = [
    '<think>\nI see\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
    "<think>\nso\n</think>\n\nthree<|im_end|>",
    "four<|im_end|>",
]


@pytest.fixture
def marked(parser):
    """Returns the template with marks around the text of answers only."""
    text = "{{ m.content }}"
    inside = "{% generation %}" + text + "{% endgeneration %}"
    return parser.tokenizer.chat_template.replace(
        text, f"{{% if m.role == 'assistant' %}}{inside}{{% else %}}{text}{{% endif %}}"
    )


def learned(parser, row):
    return parser.tokenizer.decode(row.token_ids[row.loss_mask].tolist())


def shown(parser, row):
    return parser.tokenizer.decode(row.token_ids.tolist())


def test_a_bridging_parser_keeps_the_conversation_in_one_row_with_its_reasoning(parser):
    [row] = parser.tokenize_and_mask(CONVERSATION, tools=[TOOL])
    assert learned(parser, row) == "".join(SAID)
    asked = parser.render(CONVERSATION[:1], tools=[TOOL])
    assert row.token_ids[: len(asked)].tolist() == asked


def test_the_row_is_what_a_session_leaves_when_the_model_says_the_same(parser):
    [row] = parser.tokenize_and_mask(CONVERSATION, tools=[TOOL])
    session, conversation = parser.session(tools=[TOOL]), []
    said = iter(SAID)
    for message in CONVERSATION:
        if message["role"] == "assistant":
            session.next_prompt(conversation)
            session.record(parser.tokenizer.encode(next(said), add_special_tokens=False))
            conversation.append(session.answer)
        else:
            conversation.append(message)
    [segment] = session.segments
    assert segment.token_ids.tolist() == row.token_ids.tolist()
    assert segment.loss_mask.tolist() == row.loss_mask.tolist()


def test_without_bridge_a_row_begins_where_the_template_drops_reasoning(make_parser):
    parser = make_parser(bridge=False)
    first, second = parser.tokenize_and_mask(CONVERSATION)
    assert learned(parser, first) == "".join(SAID[:2])
    assert learned(parser, second) == SAID[2]
    assert "I see" not in shown(parser, second)


def test_stepwise_shows_every_answer_the_prompt_of_the_template(parser):
    rows = parser.tokenize_and_mask(CONVERSATION, method="stepwise")
    assert [learned(parser, row) for row in rows] == SAID
    assert ["I see" in shown(parser, row) for row in rows] == [True, True, False]
    stop = parser.get_stop_token_ids()[0]
    assert all(row.token_ids[-1] == stop for row in rows)


def test_an_answer_that_an_open_prompt_does_not_fit_is_named(make_parser):
    parser = make_parser(chat_template_kwargs={"thinking": True})
    assert len(parser.tokenize_and_mask(CONVERSATION[:2])) == 1
    with pytest.raises(
        ConfigError, match=r"message 1: the rendered conversation does not start with the prompt.*reasoning"
    ):
        parser.tokenize_and_mask([CONVERSATION[0], {"role": "assistant", "content": "four"}])


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_hf_template_is_the_mask_of_transformers(make_parser, marked, tools):
    parser = make_parser(marked)
    [row] = parser.tokenize_and_mask(CONVERSATION, tools=tools, method="hf_template")
    assert learned(parser, row) == "threefour"
    [frozen] = parser.tokenize_and_mask(Messages(CONVERSATION), tools=tools, method="hf_template")  # as sft does
    assert frozen.token_ids.tolist() == row.token_ids.tolist()
    shown_by_transformers = parser.tokenizer.apply_chat_template(
        [*CONVERSATION[:1], {**CONVERSATION[1], "tool_calls": []}, *CONVERSATION[2:]],
        tools=tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert sum(shown_by_transformers["assistant_masks"]) == row.loss_mask.sum()


def test_hf_template_uses_the_variables_of_the_section(make_parser, marked):
    conditional = marked.replace("{% generation %}", "{% generation %}{{ loud or '' }}")
    parser = make_parser(conditional, chat_template_kwargs={"loud": "hello"})
    [row] = parser.tokenize_and_mask(CONVERSATION[4:], method="hf_template")
    assert learned(parser, row) == "hellofour"


@pytest.mark.parametrize(
    ("conversation", "words"),
    [
        (CONVERSATION[:1], r"marks no part"),
        (
            [*CONVERSATION[:-1], {**CONVERSATION[-1], "weight": 0}],
            r"message 5: hf_template .* does not support weights",
        ),
    ],
)
def test_hf_template_never_masks_everything_in_silence(make_parser, marked, conversation, words):
    with pytest.raises(ConfigError, match=words):
        make_parser(marked).tokenize_and_mask(conversation, method="hf_template")


def test_hf_template_needs_a_template_with_marks(parser):
    with pytest.raises(ConfigError, match=r"no \{% generation %\}"):
        parser.tokenize_and_mask(CONVERSATION, method="hf_template")
