"""Bridging: the prefix is kept verbatim, and the rest equals a rendering of the whole conversation."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rllm_renderers.probes import Tail

from rllm_core.errors import ConfigError
from rllm_core.parser import BreakReason
from rllm_core.types import Messages

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ASK = [{"role": "user", "content": "hello"}]
USER = {"role": "user", "content": "and now?"}
ANSWER = {"role": "tool", "tool_call_id": "call00001", "content": "3"}
OTHER_ANSWER = {"role": "tool", "tool_call_id": "call00002", "content": "4 <b>"}
TAILS = [[USER], [ANSWER], [ANSWER, OTHER_ANSWER], [ANSWER, USER], [ANSWER, OTHER_ANSWER, ANSWER, USER]]
EVERY_TAIL = {
    Tail(answers, user, tools)
    for answers, user in ((0, True), (1, False), (1, True), (2, False), (2, True))
    for tools in (False, True)
}
WITHOUT_TOOLS = {tail for tail in EVERY_TAIL if not tail.tools}


def ids_of(parser, text):
    return parser.tokenizer.encode(text, add_special_tokens=False)


def bridge(parser, prompt, completion, tail, tools=None):
    bridged = parser.bridge_to_next_turn(prompt, completion, tail, tools=tools)
    return None if bridged is None else bridged.tolist()


# --------------------------------------------------------------------------------------------------------------------
# The self-check: templates and tokenizers with bridging

TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

TEMPLATES = {
    "old reasoning is dropped": (None, EVERY_TAIL),
    "no tools": (TURNS + OPEN, WITHOUT_TOOLS),
    "content is stripped": (TURNS.replace("m.content", "m.content | trim") + OPEN, WITHOUT_TOOLS),
    "no stop token": (TURNS.replace("<|im_end|>", "") + OPEN, set()),
    "answers are not printed": (TURNS.replace("m.content", "(m.content if m.role == 'user' else '')") + OPEN, set()),
    "refuses tools' answers": (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
        + TURNS
        + OPEN,
        {Tail(0, True, False)},
    ),
    "newest message first": (TURNS.replace("in messages", "in messages | reverse") + OPEN, set()),
    "tools stand before the last user": (
        "{% for m in messages %}{% if tools and m.role == 'user' and loop.index0 == messages | map(attribute='role') "
        "| list | length - 1 %}{{ tools | tojson }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + OPEN,
        WITHOUT_TOOLS,
    ),
    "the number of turns is printed": ("{{ messages | length }}" + TURNS + OPEN, set()),
    "the answer's tool is named after its call": (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ messages[1].tool_calls[0].function.name }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + OPEN,
        {Tail(0, True, False)},
    ),
}


@pytest.mark.parametrize(("template", "tails"), TEMPLATES.values(), ids=TEMPLATES)
def test_bridging_is_on_exactly_where_it_is_exact(make_parser, template, tails):
    parser = make_parser() if template is None else make_parser(template)
    assert parser.bridged_tails == tails
    assert parser.supports_bridge is bool(tails)
    for tail in TAILS:
        for tools in (None, [TOOL]):
            bridged = parser.bridge_to_next_turn([1, 4], ids_of(parser, "x<|im_end|>"), tail, tools=tools)
            assert (bridged is not None) == (Tail.of(tail, tools) in tails)


def test_a_template_that_cannot_be_rendered_is_refused_at_the_start(make_parser):
    """Regression: the first prompt of a run failed with the template's own error."""
    for template, problem in (
        ("{% for %}", "Expected an expression"),
        ("{{ raise_exception('RAG needs documents') }}", "RAG needs documents"),
        (TURNS.replace("m.content", "m.role") + OPEN, "it omits user messages"),
    ):
        with pytest.raises(ConfigError, match=rf"cannot be used: .*{problem}.*; set chat_template\.") as caught:
            make_parser(template)
        assert "\n" not in str(caught.value)


def test_a_tokenizer_that_treats_the_beginning_of_a_text_differently(make_parser, metaspace):
    parser = make_parser(TURNS + OPEN, tokenizer=metaspace)
    whole = parser.render([*ASK, {"role": "assistant", "content": "higher"}, USER])
    stop = parser.get_stop_token_ids()[0]
    cut = [at for at, token in enumerate(whole) if token == stop][1] + 1
    following = parser.tokenizer.decode(whole[cut:])
    assert ids_of(parser, following) != whole[cut:]
    assert bridge(parser, whole[: cut - 3], whole[cut - 3 : cut], [USER]) == whole


def test_stop_tokens_that_open_the_next_turn(make_parser):
    """As in GLM: a turn ends with the marker of the next speaker, which the completion already contains."""
    template = (
        "{% set markers = {'user': '<|im_start|>', 'tool': '<|im_end|>', 'assistant': '<tool_response>'} %}"
        "{% for m in messages %}{{ markers[m.role] }}"
        "{{ '\n' + m.content }}{% endfor %}{% if add_generation_prompt %}<tool_response>{% endif %}"
    )
    parser = make_parser(template, stops=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    prompt = parser.render(ASK)
    assert parser.supports_bridge
    for tail, opener, other in ((USER, "<|im_start|>", "<|im_end|>"), (ANSWER, "<|im_end|>", "<|im_start|>")):
        whole = parser.render([*ASK, {"role": "assistant", "content": "higher"}, tail])
        answer = ids_of(parser, "\nhigher")
        assert bridge(parser, prompt, [*answer, *ids_of(parser, opener)], [tail]) == whole
        assert bridge(parser, prompt, answer, [tail]) == whole
        assert bridge(parser, prompt, [*answer, *ids_of(parser, other)], [tail]) is None


def test_bridging_can_be_turned_off(make_parser):
    parser = make_parser(bridge=False)
    assert not parser.supports_bridge
    assert parser.bridge_to_next_turn(parser.render(ASK), ids_of(parser, "x<|im_end|>"), [USER]) is None
    assert parser.supports_tools


def test_tools_are_supported_where_the_template_prints_them(make_parser):
    assert make_parser().supports_tools
    assert not make_parser(TURNS + OPEN).supports_tools


# --------------------------------------------------------------------------------------------------------------------
# Properties of a bridge

words = st.text(alphabet="abc xyz,.!?12äé🦊", min_size=1, max_size=30).filter(lambda text: text == text.strip())


@settings(deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=4), words, st.booleans())
def test_bridged_conversations_equal_rendered_ones(parser, exchanges, last, with_tools):
    tools = [TOOL] if with_tools else None
    messages = [{"role": "user", "content": exchanges[0][0]}]
    prompt = parser.render(messages, tools=tools)
    for position, (_, answer) in enumerate(exchanges):
        question = exchanges[position + 1][0] if position + 1 < len(exchanges) else last
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        completion = ids_of(parser, f"{answer}<|im_end|>")
        prompt = bridge(parser, prompt, completion, messages[-1:], tools=tools)
        assert prompt == parser.render(messages, tools=tools)


@pytest.mark.parametrize("tail", TAILS, ids=len)
def test_tool_cycles_equal_rendered_ones(parser, tail):
    calls = [
        {"id": m["tool_call_id"], "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
        for m in tail
        if m["role"] == "tool"
    ]
    answer = {"role": "assistant", "content": "ok", **({"tool_calls": calls} if calls else {})}
    text = (
        "ok" + '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' * len(calls) + "<|im_end|>"
    )
    prompt = parser.render(ASK, tools=[TOOL])
    bridged = bridge(parser, prompt, ids_of(parser, text), tail, tools=[TOOL])
    assert bridged == parser.render([*ASK, answer, *tail], tools=[TOOL])


def test_a_completion_that_was_cut_off_gets_its_stop_token_as_prompt(parser):
    prompt, cut = parser.render(ASK), ids_of(parser, "higher")
    stop = parser.get_stop_token_ids()[0]
    bridged = bridge(parser, prompt, cut, [USER])
    assert bridged == bridge(parser, prompt, [*cut, stop], [USER])
    assert bridged[: len(prompt) + len(cut) + 1] == [*prompt, *cut, stop]


def test_reasoning_stays_where_the_template_would_drop_it(parser):
    prompt, completion = parser.render(ASK), ids_of(parser, "<think>\nwhy\n</think>\n\nhigher<|im_end|>")
    bridged = bridge(parser, prompt, completion, [USER])
    answer = {"role": "assistant", "content": "higher", "reasoning_content": "why"}
    rendered = parser.render([*ASK, answer, USER])
    assert "why" in parser.tokenizer.decode(bridged)
    assert "why" not in parser.tokenizer.decode(rendered)
    assert bridged[len(prompt) + len(completion) :] == rendered[-len(bridged) + len(prompt) + len(completion) :]


def test_what_cannot_be_proven_is_not_bridged(parser):
    prompt, good = parser.render(ASK), ids_of(parser, "higher<|im_end|>")
    bridge = parser.bridge_to_next_turn
    assert bridge(prompt, good, [USER]) is not None
    assert bridge([], good, [USER]) is None
    assert bridge(prompt, good, []) is None
    assert bridge(prompt, good, [{"role": "assistant", "content": "no"}]) is None
    assert bridge(prompt, good, [USER, USER]) is None
    assert bridge(prompt, good, [USER, ANSWER]) is None
    assert bridge(prompt, good, [{"role": "system", "content": "no"}, USER]) is None
    assert bridge(prompt, good, [{"role": "wizard", "content": "no"}]) is None
    assert bridge(prompt, good, [{"content": "no role"}]) is None
    assert bridge(prompt, good, [ANSWER | {"content": 3}]) is None
    assert bridge(prompt, ids_of(parser, "higher<|endoftext|>"), [USER]) is None
    assert bridge(prompt, ids_of(parser, "higher<|im_end|>more"), [USER]) is None
    assert bridge(prompt, ids_of(parser, "higher<|im_end|><|im_end|>"), [USER]) is not None
    assert bridge(prompt, ids_of(parser, "<think>why<|im_end|>"), [USER]) is None
    assert bridge(prompt, ids_of(parser, "<think>why"), [USER]) is None
    opened = [*prompt, *ids_of(parser, "<think>\n")]
    assert bridge(opened, ids_of(parser, "why"), [USER]) is None
    assert bridge(opened, ids_of(parser, "why</think>so"), [USER]) is not None


# --------------------------------------------------------------------------------------------------------------------
# Families of templates

WITHOUT_LATER_USERS_AND_TOOLS = {tail for tail in EVERY_TAIL if not (tail.user and tail.tools)}
ONE_CALL = {tail for tail in EVERY_TAIL if tail.answers < 2}
FAMILY_TAILS = {
    "glm": EVERY_TAIL,
    "llama": ONE_CALL,
    "mistral": WITHOUT_LATER_USERS_AND_TOOLS,
    "gemma": {Tail(0, True, False)},
    "deepseek": EVERY_TAIL,
    "harmony": {tail for tail in ONE_CALL if tail.answers},
    "harmony_final": {tail for tail in ONE_CALL if tail.answers},
    "qwen_thinking": EVERY_TAIL,
    "qwen_not_thinking": EVERY_TAIL,
}


@pytest.mark.parametrize("name", FAMILY_TAILS)
def test_what_families_bridge(make_family_parser, name):
    assert make_family_parser(name).bridged_tails == FAMILY_TAILS[name]


@pytest.mark.parametrize(
    "name", ["glm", "llama", "mistral", "deepseek", "harmony", "qwen_thinking", "qwen_not_thinking"]
)
def test_tool_cycles_of_families_equal_rendered_ones(make_family_parser, families, name):
    """The answer uses the tokens of the template, so that only the bridge can differ."""
    parser = make_family_parser(name)
    prompt = parser.render(ASK, tools=[TOOL])
    completion = parser.template.encoder.encode(families[name]["answer"])
    answer = parser.parse_completion(completion, prompt_ids=prompt, tools=[TOOL]).to_message(turn=0)
    assert len(answer["tool_calls"]) == 1
    whole = parser.render([*ASK, answer, ANSWER], tools=[TOOL])
    assert bridge(parser, prompt, completion, [ANSWER], tools=[TOOL]) == whole


def test_conversations_of_families_equal_rendered_ones(make_family_parser):
    for name, stop in (("gemma", "<end_of_turn>"), ("llama", "<|eot_id|>"), ("mistral", "</s>")):
        parser = make_family_parser(name)
        whole = parser.render([*ASK, {"role": "assistant", "content": "higher"}, USER])
        assert bridge(parser, parser.render(ASK), ids_of(parser, f"higher{stop}"), [USER]) == whole


def test_a_tool_named_in_its_answer_is_the_one_that_was_called(make_family_parser):
    parser = make_family_parser("harmony")
    prompt = parser.render(ASK)

    def called(*names):
        calls = [f" to=functions.{name}<|channel|>commentary json<|message|>{{}}" for name in names]
        return ids_of(parser, "<|end|><|start|>assistant".join(calls) + "<|call|>")

    for name in ("add", "subtract"):
        bridged = parser.template.encoder.decode(bridge(parser, prompt, called(name), [ANSWER]))
        assert bridged.endswith(
            f'functions.{name} to=assistant<|channel|>commentary<|message|>"3"<|end|><|start|>assistant'
        )
    assert bridge(parser, prompt, called("add", "subtract"), [ANSWER]) is None
    assert bridge(parser, prompt, ids_of(parser, "<|channel|>final<|message|>no call<|call|>"), [ANSWER]) is None


def test_what_the_history_of_a_family_writes_otherwise_is_not_bridged(make_family_parser):
    harmony = make_family_parser("harmony")
    final = ids_of(harmony, "<|channel|>final<|message|>higher<|return|>")
    assert bridge(harmony, harmony.render(ASK), final, [USER]) is None
    llama = make_family_parser("llama")
    call = '<|python_tag|>{"name": "add", "parameters": {}}'
    assert bridge(llama, llama.render(ASK), ids_of(llama, call + "<|eot_id|>"), [ANSWER]) is not None
    assert bridge(llama, llama.render(ASK), ids_of(llama, call + "<|eom_id|>"), [ANSWER]) is None
    thinking = make_family_parser("qwen_thinking")
    assert bridge(thinking, thinking.render(ASK), ids_of(thinking, "hm</think>so<|im_end|>"), [USER]) is not None
    assert bridge(thinking, thinking.render(ASK), ids_of(thinking, "hm<|im_end|>"), [USER]) is None


def test_an_empty_block_of_reasoning_in_the_prompt_opens_none(make_family_parser):
    parser = make_family_parser("qwen_not_thinking")
    prompt, completion = parser.render(ASK), ids_of(parser, "so<|im_end|>")
    parsed = parser.parse_completion(completion, prompt_ids=prompt)
    assert (parsed.content, parsed.reasoning) == ("so", None)
    assert bridge(parser, prompt, completion, [USER])[: len(prompt) + len(completion)] == [*prompt, *completion]


# --------------------------------------------------------------------------------------------------------------------
# Sessions keep all sampled tokens unchanged

contents = st.text(max_size=20).filter(lambda text: text.isascii() or text.encode(errors="ignore").decode() == text)
tails = st.sampled_from(TAILS) | contents.map(lambda text: [{"role": "user", "content": text}])


@st.composite
def conversations(draw):
    """Completions of random ids (stop tokens, tags and unknown ids among them), each with its tail."""
    special = st.sampled_from([0, 1, 2, *range(380, 406), 10_000])
    canonical = st.sampled_from(["higher", "<think>why</think>so", "<tool_call>{}</tool_call>", "<think>", " \n"])
    ends = st.sampled_from(["", "<|im_end|>", "<|endoftext|>", "<|im_end|><|endoftext|>"])
    completion = st.one_of(
        st.lists(st.integers(0, 405) | special, min_size=1, max_size=12),
        st.tuples(canonical, ends).map("".join),
    )
    return draw(st.lists(st.tuples(completion, tails), min_size=1, max_size=5))


def play(parser, turns, tools):
    """Returns prompts and completions of a session, in order."""
    session = parser.session(tools=tools)
    messages = Messages(ASK)
    played = []
    for completion, tail in turns:
        ids = ids_of(parser, completion) if isinstance(completion, str) else completion
        turn = session.next_prompt(messages)
        parsed = session.record(ids)
        assert session.last_completion_ids.tolist() == ids
        played.append((turn, ids, parsed))
        messages.append(session.answer)
        messages.extend(tail)
    played.append((session.next_prompt(messages), [], None))
    return session, played


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(conversations(), st.booleans(), st.booleans())
def test_a_session_never_loses_or_alters_a_token(parser, rendering_parser, turns, with_tools, bridging):
    check_session(parser if bridging else rendering_parser, turns, [TOOL] if with_tools else None)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY_TAILS)
@settings(deadline=None, max_examples=40)
@given(data=st.data(), with_tools=st.booleans())
def test_no_family_loses_or_alters_a_token(family_parsers, families, name, data, with_tools):
    parser, family = family_parsers[name], families[name]
    special = [parser.tokenizer.convert_tokens_to_ids(token) for token in family["tokens"] + family["stops"]]
    answer = ids_of(parser, family["answer"])
    cut = st.integers(1, len(answer)).map(lambda length: answer[:length])
    noise = st.lists(st.integers(0, len(parser.tokenizer)) | st.sampled_from(special), min_size=1, max_size=12)
    taken = [tail for tail in TAILS if name != "gemma" or tail == [USER]]
    if name in ("llama", "harmony", "harmony_final"):
        taken = taken[:2]
    completions = cut | noise | st.builds(lambda body, stop: [*body, stop], cut | noise, st.sampled_from(special))
    turns = data.draw(st.lists(st.tuples(completions, st.sampled_from(taken)), min_size=1, max_size=4))
    check_session(parser, turns, [TOOL] if with_tools else None)


def check_session(parser, turns, tools):
    session, played = play(parser, turns, tools)
    stops = set(parser.get_stop_token_ids())
    for (turn, ids, parsed), (following, _, _) in pairwise(played):
        so_far = [*turn.prompt_ids.tolist(), *ids]
        if following.segment == turn.segment:
            assert following.prompt_ids[: len(so_far)].tolist() == so_far
            assert following.break_reason is None
        else:
            assert following.segment == turn.segment + 1
            assert following.break_reason in (BreakReason.BRIDGE_NONE, BreakReason.TOKENS_AFTER_STOP)
        assert (parsed.termination == "truncated") == (not stops & set(ids))
    assert session.stats.breaks.total() == played[-1][0].segment
    assert session.stats.bridged + session.stats.rendered == len(played)
    assert session.stats.breaks[BreakReason.PREFIX_MISMATCH] == 0
    sampled = [token for _, ids, _ in played for token in ids]
    kept = [segment.token_ids[segment.loss_mask].tolist() for segment in session.segments]
    assert [token for tokens in kept for token in tokens] == sampled


@settings(deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=20), st.sampled_from(TAILS), st.booleans())
def test_ordinary_tokens_never_break_a_segment(parser, draws, tail, stopped):
    ordinary = sorted(set(parser.tokenizer.get_vocab().values()) - set(parser.tokenizer.added_tokens_decoder))
    ids = [ordinary[draw % len(ordinary)] for draw in draws]
    completion = [*ids, parser.get_stop_token_ids()[0]] if stopped else ids
    session, _ = play(parser, [(completion, tail)] * 3, [TOOL])
    assert not session.stats.breaks
    assert session.stats.bridged == 3


@pytest.fixture(scope="session")
def family_parsers(make_family_parser):
    return {name: make_family_parser(name) for name in FAMILY_TAILS}


@pytest.fixture(scope="session")
def rendering_parser(make_parser):
    return make_parser(stops=("<|im_end|>", "<|endoftext|>"), bridge=False)
