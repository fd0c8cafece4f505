from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rllm_renderers.chat_template import ChatTemplateConfig
from rllm_renderers.formats import FORMATS, NoCalls, schemas_of

from rllm_core.parser import Termination

BAR = "\N{FULLWIDTH VERTICAL LINE}"
SCHEMAS = {
    "f": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "on": {"type": "boolean"},
        "items": {"type": "array"},
        "data": {"type": "object"},
        "note": {"type": ["string", "null"]},
        "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "unit": {"enum": ["1", "2"]},
        "any": {},
    }
}


def read(name, text, *, stopped=True, schemas=SCHEMAS, **named):
    return FORMATS[name].read(text, stopped=stopped, schemas=schemas, **named)


def found(parsed):
    return [(call.name, call.arguments, call.status) for call in parsed.tool_calls]


def test_schemas_are_found_in_both_shapes_of_a_tool():
    properties = {"a": {"type": "string"}}
    flat = {"name": "f", "parameters": {"properties": properties}}
    assert schemas_of([flat]) == schemas_of([{"type": "function", "function": flat}]) == {"f": properties}
    assert schemas_of([{"name": "g"}, {"name": "h", "parameters": None}]) == {"g": {}, "h": {}}


def test_without_a_format_everything_is_content():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parsed = NoCalls().read(f"<think>a</think>{text}", stopped=True)
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == ("a", text, ())


# --------------------------------------------------------------------------------------------------------------------
# Hermes (see also test_completion.py)


def test_a_closing_tag_in_a_json_string_does_not_close_the_call():
    arguments = {"text": "</tool_call> and <tool_call> and }"}
    parsed = read("hermes", f'<tool_call>{{"name": "f", "arguments": {json.dumps(arguments)}}}\n</tool_call> done')
    assert found(parsed) == [("f", arguments, "ok")]
    assert parsed.content == "done"


# --------------------------------------------------------------------------------------------------------------------
# Qwen's XML


def xml(*parameters, name="f"):
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "true", "true"),
        ("text", "007", "007"),
        ("text", "null", "null"),
        ("text", '"quoted"', '"quoted"'),
        ("text", "  two spaces\n", "  two spaces\n"),
        ("text", "", ""),
        ("text", "\n", "\n"),
        ("text", "a </parameter> b </function> c </tool_call> <tool_call>", None),
        ("text", "if a < b:\n\treturn '<parameter=x>'\n\n", None),
        ("count", "7", 7),
        ("count", " 7 ", 7),
        ("ratio", "1e-5", 1e-5),
        ("ratio", "0.10", 0.1),
        ("on", "true", True),
        ("on", "False", False),
        ("items", '["a","b", 1]', ["a", "b", 1]),
        ("items", '["\\u00e9"]', ["é"]),
        ("data", '{"a": {"b": null}}', {"a": {"b": None}}),
        ("note", "null", Ellipsis),
        ("note", "None", Ellipsis),
        ("note", "nothing", "nothing"),
        ("size", "None", Ellipsis),
        ("size", "3", 3),
        ("unit", "1", "1"),
        ("any", "plain words", "plain words"),
        ("any", "007", "007"),
        ("any", '"quoted"', '"quoted"'),
        ("any", "12", 12),
        ("unheard of", "plain words", "plain words"),
    ],
)
def test_values_of_xml_have_the_type_of_the_schema(key, text, value):
    wanted = {key: None if value is Ellipsis else text if value is None else value}
    parsed = read("qwen_xml", xml((key, text), ("count", "1")) + "\n")
    assert found(parsed) == [("f", wanted | {"count": 1}, "ok")]
    assert all(type(parsed.tool_calls[0].arguments[name]) is not float or name == "ratio" for name in wanted)
    assert parsed.content == ""


@pytest.mark.parametrize(
    ("key", "text"),
    [("count", "seven"), ("on", "yes"), ("items", "a, b"), ("ratio", "NaN"), ("data", "{"), ("size", "")],
)
def test_values_that_are_not_what_the_schema_asks_for(key, text):
    assert found(read("qwen_xml", xml((key, text)))) == [("f", None, "invalid_json")]


def test_xml_without_a_schema_is_never_an_error():
    text = xml(("a", "plain"), ("b", "true"), ("c", "[1, 2"), ("d", "[1]"))
    assert found(read("qwen_xml", text, schemas=None)) == [
        ("f", {"a": "plain", "b": True, "c": "[1, 2", "d": [1]}, "ok")
    ]


@pytest.mark.parametrize(
    ("text", "status", "content"),
    [
        ("a " + xml() + " b", "ok", "a  b"),
        ("<function=f>\n</function> b", "ok", "b"),
        (xml(name="g"), "unknown_tool", ""),
        (xml(name=""), "missing_name", ""),
        ("<tool_call>\n{}\n</tool_call>b", "missing_name", "b"),
        ("<tool_call><function=f>words</function></tool_call>b", "malformed_structure", "b"),
        ("<tool_call><function=f><parameter=a>1</function></tool_call>b", "malformed_structure", "b"),
        ("<tool_call><function=f><parameter=a>1", "unclosed_block", ""),
        ("<tool_call><function=f></function>", "unclosed_block", ""),
        ("<tool_call>", "unclosed_block", ""),
    ],
)
def test_attempts_at_xml(text, status, content):
    parsed = read("qwen_xml", text)
    assert ([call.status for call in parsed.tool_calls], parsed.content) == ([status], content)
    assert parsed.termination is (Termination.MALFORMED if status == "unclosed_block" else Termination.STOP)


# --------------------------------------------------------------------------------------------------------------------
# GLM


def glm(*arguments, name="f"):
    inside = "".join(f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in arguments)
    return f"<tool_call>{name}{inside}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "expected", "content"),
    [
        (f"so {glm()}", [("f", {}, "ok")], "so"),
        (glm(("text", "true"), ("on", "false")), [("f", {"text": "true", "on": False}, "ok")], ""),
        (glm(("text", "<arg_key> </arg_value>x")), [("f", {"text": "<arg_key> </arg_value>x"}, "ok")], ""),
        (glm(("text", " two \n")), [("f", {"text": " two \n"}, "ok")], ""),
        (glm(("count", "three")), [("f", None, "invalid_json")], ""),
        (glm(name="g"), [("g", {}, "unknown_tool")], ""),
        (glm(name=""), [(None, None, "missing_name")], ""),
        ("<tool_call>f<arg_key>a</tool_call>", [(None, None, "malformed_structure")], ""),
        ('<tool_call>f <b> {"a": 1}</tool_call>', [(None, None, "malformed_structure")], ""),
        ("<tool_call>f", [(None, None, "unclosed_block")], ""),
        (f"<tool_call>f<arg_key>{glm()}", [(None, None, "unclosed_block"), ("f", {}, "ok")], ""),
    ],
)
def test_glm(text, expected, content):
    parsed = read("glm", text)
    assert (found(parsed), parsed.content) == (expected, content)


# --------------------------------------------------------------------------------------------------------------------
# Llama

LLAMA = '{"name": "f", "parameters": {"text": "}"}}'


@pytest.mark.parametrize(
    ("text", "expected", "content"),
    [
        (LLAMA, [("f", {"text": "}"}, "ok")], ""),
        (f"\n {LLAMA}\n", [("f", {"text": "}"}, "ok")], ""),
        (f"<|python_tag|>{LLAMA}", [("f", {"text": "}"}, "ok")], ""),
        (f"well <|python_tag|>{LLAMA}", [("f", {"text": "}"}, "ok")], "well"),
        (f"{LLAMA}; {LLAMA}", [("f", {"text": "}"}, "ok")] * 2, ""),
        (f"{LLAMA} and so on", [("f", {"text": "}"}, "ok")], "and so on"),
        ('{"type": "function", "name": "f", "arguments": {}}', [("f", {}, "ok")], ""),
        ('{"name": "g", "parameters": {}}', [("g", {}, "unknown_tool")], ""),
        ('{"name": "f", "parameters": 3}', [("f", None, "malformed_structure")], ""),
        ('{"name": "f", "parameters": {', [(None, None, "unclosed_block")], ""),
        ('{"name": "f", "parameters": {"te', [(None, None, "unclosed_block")], ""),
        ('{"name": "f" "parameters": {}}', [(None, None, "invalid_json")], ""),
        ("<|python_tag|>print(1)", [(None, None, "invalid_json")], ""),
        ("<|python_tag|>", [(None, None, "unclosed_block")], ""),
        ("<|python_tag|>[1]", [(None, None, "malformed_structure")], ""),
        ('{"answer": 3}', [], '{"answer": 3}'),
        ('{"name": "Ada"}', [], '{"name": "Ada"}'),
        (f"see: {LLAMA}", [], f"see: {LLAMA}"),
        ("[1, 2]", [], "[1, 2]"),
    ],
)
def test_llama(text, expected, content):
    parsed = read("llama", text)
    assert (found(parsed), parsed.content) == (expected, content)


# --------------------------------------------------------------------------------------------------------------------
# Mistral

ONE = '{"name": "f", "arguments": {"count": 1}, "id": "abcdefghi"}'


@pytest.mark.parametrize(
    ("text", "expected", "content"),
    [
        (f"[TOOL_CALLS][{ONE}]", [("f", {"count": 1}, "ok")], ""),
        (f"[TOOL_CALLS] [ {ONE} , {ONE} ] end", [("f", {"count": 1}, "ok")] * 2, "end"),
        ('so [TOOL_CALLS]f[ARGS]{"count": 1}', [("f", {"count": 1}, "ok")], "so"),
        (
            '[TOOL_CALLS]f[ARGS]{"count": 1}[TOOL_CALLS]g[ARGS]{}',
            [("f", {"count": 1}, "ok"), ("g", {}, "unknown_tool")],
            "",
        ),
        ('[TOOL_CALLS]f{"count": 1}', [("f", {"count": 1}, "ok")], ""),
        ("[TOOL_CALLS][ARGS]{}", [(None, None, "missing_name")], ""),
        ("[TOOL_CALLS]f[ARGS]{", [(None, None, "unclosed_block")], ""),
        ("[TOOL_CALLS]f[ARGS]{1}", [(None, None, "invalid_json")], ""),
        ("[TOOL_CALLS]f[ARGS]", [(None, None, "unclosed_block")], ""),
        ("[TOOL_CALLS]f words", [(None, None, "invalid_json")], ""),
        ("[TOOL_CALLS]", [(None, None, "unclosed_block")], ""),
        ("[TOOL_CALLS][]", [(None, None, "malformed_structure")], ""),
        ("[TOOL_CALLS][{}]", [(None, None, "missing_name")], ""),
        (f"[TOOL_CALLS][{ONE}", [(None, None, "unclosed_block")], ""),
        (f"[TOOL_CALLS][{ONE}, 3]", [(None, None, "invalid_json")], ""),
        (f"[TOOL_CALLS][{ONE}, {{", [("f", {"count": 1}, "ok"), (None, None, "unclosed_block")], ""),
        ("[TOOL_CALLS]" + " " * 100_000 + "? !", [(None, None, "invalid_json")], ""),
    ],
)
def test_mistral(text, expected, content):
    parsed = read("mistral", text)
    assert (found(parsed), parsed.content) == (expected, content)


def test_ids_of_mistral():
    assert read("mistral", f"[TOOL_CALLS][{ONE}]").tool_calls[0].call_id == "abcdefghi"
    assert read("mistral", "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}").tool_calls[0].call_id == "abc123def"
    made = [call.call_id for call in read("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}").tool_calls]
    assert len(set(made)) == 2
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in made)


def test_reasoning_of_mistral():
    parsed = read("mistral", "[THINK]why[/THINK]so")
    assert (parsed.reasoning, parsed.content) == ("why", "so")
    assert read("mistral", "[THINK]why[TOOL_CALLS]f[ARGS]{}").reasoning == "why"


# --------------------------------------------------------------------------------------------------------------------
# DeepSeek


def marked(*calls):
    inside = "".join(f"<{BAR}tool▁call▁begin{BAR}>{call}<{BAR}tool▁call▁end{BAR}>" for call in calls)
    return f"<{BAR}tool▁calls▁begin{BAR}>{inside}<{BAR}tool▁calls▁end{BAR}>".replace("|", f"<{BAR}tool▁sep{BAR}>")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ('function|f\n```json\n{"count": 1}\n```', ("f", {"count": 1}, "ok")),
        ('function|f\n```\n{"text": "```"}\n```', ("f", {"text": "```"}, "ok")),
        ('f|{"text": "```json"}', ("f", {"text": "```json"}, "ok")),
        ("g|{}", ("g", {}, "unknown_tool")),
        ("|{}", (None, None, "missing_name")),
        ("f|[1]", ("f", None, "malformed_structure")),
        ("f|{", ("f", None, "invalid_json")),
        ("function|f\n```json\n{]\n```", ("f", None, "invalid_json")),
        ("f {}", (None, None, "malformed_structure")),
    ],
)
def test_deepseek(call, expected):
    parsed = read("deepseek", f"so {marked(call)}")
    assert (found(parsed), parsed.content) == ([expected], "so")
    assert parsed.tool_calls[0].raw == marked(call)


def test_several_calls_of_deepseek():
    text = marked("f|{}", 'f|{"count": 2}')
    parsed = read("deepseek", f"<think>hm</think>so{text}end")
    assert (found(parsed), parsed.content) == ([("f", {}, "ok"), ("f", {"count": 2}, "ok")], "soend")
    assert "".join(call.raw for call in parsed.tool_calls) == text
    cut = text.index("f", 30) + 1
    assert found(read("deepseek", text[:cut])) == [(None, None, "unclosed_block")]


# --------------------------------------------------------------------------------------------------------------------
# Harmony

ANALYSIS = "<|channel|>analysis<|message|>hm<|end|>"
CALL = " to=functions.f<|channel|>commentary json<|message|>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "expected"),
    [
        ("hello", None, "hello", []),
        ("<|channel|>final<|message|>hello", None, "hello", []),
        (f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>so", "hm", "so", []),
        (f"{ANALYSIS}{ANALYSIS.join(['<|start|>assistant'] * 2)}".removesuffix("<|start|>assistant"), "hm\nhm", "", []),
        ("<|channel|>commentary<|message|>first<|end|>", None, "first", []),
        (f'{CALL}{{"count": 1}}', None, "", [("f", {"count": 1}, "ok")]),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", None, "", [("f", {}, "ok")]),
        (f"{ANALYSIS}<|start|>assistant{CALL}{{}}", "hm", "", [("f", {}, "ok")]),
        ("<|channel|>analysis to=browser.search code<|message|>{}", None, "", [("browser.search", {}, "unknown_tool")]),
        (f"{CALL}{{", None, "", [("f", None, "invalid_json")]),
        (f"{CALL}[]", None, "", [("f", None, "malformed_structure")]),
        (" to=functions.f<|channel|>commentary", None, "", [(None, None, "unclosed_block")]),
        ("<|channel|>wizardry<|message|>x", None, "<|channel|>wizardry<|message|>x", []),
        ("<|channel|>fin", None, "<|channel|>fin", []),
        ("odd header<|message|>x", None, "odd header<|message|>x", []),
    ],
)
def test_harmony(text, reasoning, content, expected):
    parsed = read("harmony", text)
    assert (parsed.reasoning, parsed.content, found(parsed)) == (reasoning, content, expected)


def test_unfinished_messages_of_harmony():
    parsed = read("harmony", "<|channel|>analysis<|message|>hm")
    assert (parsed.reasoning_complete, parsed.termination) == (False, Termination.MALFORMED)
    parsed = read("harmony", f"{CALL}{{}}", stopped=False)
    assert (found(parsed), parsed.termination) == ([(None, None, "unclosed_block")], Termination.TRUNCATED)


def test_messages_of_harmony_that_the_prompt_began():
    opened = FORMATS["harmony"].opened_by("x<|end|><|start|>assistant<|channel|>final<|message|>")
    parsed = read("harmony", f"so<|end|><|start|>assistant{CALL}{{}}", opened_by_prompt=opened)
    assert (parsed.content, found(parsed)) == ("so", [("f", {}, "ok")])
    assert FORMATS["harmony"].opened_by("<|start|>user<|message|>x<|end|>") == ""


# --------------------------------------------------------------------------------------------------------------------
# All of them


@pytest.mark.parametrize(
    "name", ["glm", "llama", "mistral", "gemma", "deepseek", "harmony", "harmony_final", "qwen_thinking"]
)
def test_the_format_is_read_off_the_template(make_family_parser, families, name):
    parser, family = make_family_parser(name), families[name]
    assert parser.tool_format.name == family["tool_format"]
    assert parser.supports_tools is (family["tool_format"] != "none")
    answer = parser.template.encoder.encode(family["answer"])
    parsed = parser.parse_completion(answer, prompt_ids=parser.render([{"role": "user", "content": "?"}]))
    calls = [("add", {"a": 1, "b": "x"}, "ok")] if parser.supports_tools else []
    assert (found(parsed), parsed.termination) == (calls, Termination.STOP)


def test_the_format_stands_in_the_text_of_a_template_that_takes_no_calls(make_parser):
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no') }}{% endif %}{{ m.content }}<|im_end|>"
    )
    explained = "{% if tools %}{{ tools | tojson }} Write <tool_call><function=name>{% endif %}{% endfor %}"
    assert make_parser(template + explained).tool_format.name == "qwen_xml"
    assert make_parser(template + "{% endfor %}").tool_format.name == "none"


def test_every_format_can_be_chosen():
    assert set(get_args(ChatTemplateConfig.model_fields["tool_format"].annotation)) == {"auto", *FORMATS}


def test_calls_that_are_written_in_no_known_way(make_parser):
    template = (
        "{{ tools }} Write <tool_call>{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls %}<tool_call>{{ c.function.name }}({{ c.function.arguments }}){% endfor %}"
        "<|im_end|>{% endfor %}"
    )
    parser = make_parser(template)
    assert parser.tool_format.name == "none"
    assert not parser.supports_tools


def test_the_format_can_be_set(make_parser):
    parser = make_parser("{{ tools }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", tool_format="llama")
    assert parser.supports_tools
    completion = parser.tokenizer.encode(LLAMA + "<|im_end|>", add_special_tokens=False)
    assert found(parser.parse_completion(completion)) == [("f", {"text": "}"}, "ok")]


PIECES = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<function=f>", "</function>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<parameter=text>", "</parameter>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", ";", ","),
    *(f"<{BAR}tool▁{part}{BAR}>" for part in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
    *("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "assistant", "analysis", "commentary", " to=functions.f"),
    *("final", "<|constrain|>", "json", "```json\n", "```", "f", "text", "\n", " ", "\0", "{}", '{"count": 1}'),
    *('{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"text": "x"}}', '{"name"', '{"', '"', "\ud800"),
]
FORMAT_TEXT = {
    "qwen_xml": ["<think>", "</think>"],
    "hermes": ["<think>", "</think>"],
    "glm": ["<think>", "</think>"],
    "deepseek": ["<think>", "</think>"],
    "mistral": ["[THINK]", "[/THINK]"],
    "llama": ["<think>", "</think>"],
    "harmony": [
        *("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "assistant"),
        *("analysis", "commentary", "final", "json", "code", "to=functions.f"),
    ],
}


def letters(text, format_text):
    for piece in format_text:
        text = text.replace(piece, "")
    return sorted("".join(text.split()))


@pytest.mark.parametrize("name", FORMATS)
@given(
    text=st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=14).map("".join),
    stopped=st.booleans(),
    opened=st.booleans(),
    with_schemas=st.booleans(),
)
def test_nothing_a_model_writes_raises_or_vanishes(name, text, stopped, opened, with_schemas):
    begin = {"harmony": "<|channel|>analysis<|message|>"}.get(name, "<think>") if opened else ""
    parsed = read(name, text, stopped=stopped, opened_by_prompt=begin, schemas=SCHEMAS if with_schemas else None)
    assert (parsed.termination is Termination.TRUNCATED) == (not stopped)
    assert (parsed.reasoning is None) == (parsed.reasoning_complete is None)
    for call in parsed.tool_calls:
        assert (call.arguments is not None) == (call.status in ("ok", "unknown_tool"))
        assert call.raw
    assert parsed.to_message(turn=1)["role"] == "assistant"
    shown = "\n".join([parsed.content, parsed.reasoning or "", *(call.raw for call in parsed.tool_calls)])
    assert letters(shown, FORMAT_TEXT[name]) == letters(text, FORMAT_TEXT[name])
