from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError
from rllm_renderers.package import VERSIONS, load_package
from rllm_renderers.renderer import RendererConfig, RendererParser

from rllm_core.errors import ConfigError
from rllm_core.parser import Termination
from rllm_core.types import Messages, freeze

ASK = [{"role": "user", "content": "hello"}]
USER = {"role": "user", "content": "and now?"}
RESULT = {"role": "tool", "tool_call_id": "call_a", "content": "3"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FLAT_TOOL = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FLAT_TOOL}

PLAIN_CHATML = (
    "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def ids_of(parser, text):
    return parser.tokenizer.encode(text, add_special_tokens=False)


def one_line(caught):
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --------------------------------------------------------------------------------------------------------------------
# Which family


def test_the_family_is_the_one_that_renders_what_the_template_renders(make_renderer):
    parser = make_renderer(PLAIN_CHATML, family="auto")
    assert (parser.family, parser.mismatch) == ("qwen3", None)
    messages = [{"role": "system", "content": "x"}, *ASK, {"role": "assistant", "content": "higher"}, USER]
    assert parser.render(messages) == parser.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )


@pytest.mark.parametrize("model_type", ["nemotron3", "qwen3_moe", "llama", ""])
def test_a_model_type_decides_only_which_family_is_tried_first(make_tokenizer, model_type):
    thinking = PLAIN_CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    for template, family in ((PLAIN_CHATML, "qwen3"), (thinking, None)):
        tokenizer = make_tokenizer(template)
        if family is None:
            with pytest.raises(ConfigError, match="of no known family"):
                RendererParser(tokenizer, model_type=model_type)
        else:
            assert RendererParser(tokenizer, model_type=model_type).family == family


def test_a_template_of_no_family_is_one_clear_line(parser):
    with pytest.raises(ConfigError) as caught:
        RendererParser(parser.tokenizer, path="m")
    complaint = one_line(caught)
    assert "qwen3 (differs with tools" in complaint
    assert "kimi-k2" not in complaint  # its tokens are not there, so it is no candidate
    assert 'renderer.family = "..." forces one' in complaint
    assert 'parser = "chat_template"' in complaint


def test_a_template_that_nobody_can_render(make_renderer):
    with pytest.raises(ConfigError, match="the template takes no conversation"):
        make_renderer("{{ raise_exception('no') }}", family="auto")


def test_without_a_template_the_family_must_be_named(make_renderer):
    with pytest.raises(ConfigError, match=r"has no chat template.*set renderer\.family to one of qwen3,"):
        make_renderer(family="auto")
    assert make_renderer(family="qwen3").render(ASK)


def test_a_family_that_is_named_is_used_and_says_where_it_differs(parser, make_renderer):
    named = RendererParser(parser.tokenizer, RendererConfig(family="qwen3"))
    assert named.family == "qwen3"
    assert named.mismatch == "differs with tools, 2 messages"
    assert named.supports_bridge


@pytest.mark.parametrize(
    ("family", "complaint"),
    [
        ("kimi-k2", r"cannot be used with model 'a-model': Special token '<\|im_user\|>' not found.*chat_template"),
        ("deepseek-v3", r"cannot be used with model 'a-model': Expected single token.*chat_template"),
        ("qwen", r"'qwen' is unknown \(did you mean 'qwen3.*choose auto, qwen3, "),
        ("default", r'cannot bridge; parser = "chat_template"'),
    ],
)
def test_a_family_that_cannot_be_used_is_one_clear_line(make_renderer, family, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        make_renderer(family=family)
    one_line(caught)


@pytest.mark.parametrize("name", ["model", "Qwen3-8B", "Qwen/Qwen3.5-0.8B", "super"])
def test_the_name_of_a_folder_means_nothing(make_tokenizer, tmp_path, name):
    make_tokenizer(PLAIN_CHATML).save_pretrained(tmp_path / name)
    parser = RendererParser.from_model(tmp_path / name)
    assert parser.family == "qwen3"
    assert parser.supports_bridge


def test_a_model_that_takes_images_is_refused_by_name(model_folder):
    for key in ("vision_config", "image_token_id"):
        (model_folder / "config.json").write_text(json.dumps({"model_type": "qwen3", key: {}}))
        with pytest.raises(ConfigError, match=rf'{key} in its config.json.*set parser = "chat_template"') as caught:
            RendererParser.from_model(model_folder, RendererConfig(family="qwen3"))
        one_line(caught)


@pytest.mark.parametrize("written", ["{", "[]"])
def test_a_damaged_config(model_folder, written):
    (model_folder / "config.json").write_text(written)
    with pytest.raises(ConfigError, match=r"config\.json of model .* (cannot be read|is not a table)") as caught:
        RendererParser.from_model(model_folder, RendererConfig(family="qwen3"))
    one_line(caught)


def test_a_model_folder(model_folder, renderer):
    parser = RendererParser.from_model(str(model_folder), RendererConfig(family="qwen3"))
    assert parser.render(ASK) == renderer.render(ASK)
    assert parser.get_stop_token_ids() == tuple(ids_of(parser, "<|im_end|><|endoftext|>"))
    with pytest.raises(ConfigError, match=r"model\.path is not set; the renderer parser"):
        RendererParser.from_model("")


def test_code_that_comes_with_a_model_does_not_run(model_folder):
    path = model_folder / "tokenizer_config.json"
    own = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (model_folder / "evil.py").write_text("raise SystemExit('this code must not run')")
    with pytest.raises(ConfigError, match=r"set renderer\.trust_remote_code = true"):
        RendererParser.from_model(model_folder)


# --------------------------------------------------------------------------------------------------------------------
# Options


def test_options_of_the_family(make_renderer):
    quiet = make_renderer(family_options={"enable_thinking": False})
    assert quiet.tokenizer.decode(quiet.render(ASK)).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert quiet.supports_bridge
    assert not quiet.tokenizer.decode(make_renderer().render(ASK)).endswith("</think>\n\n")


def test_options_are_variables_of_the_template_too(make_renderer):
    template = PLAIN_CHATML.replace(
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}",
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
    )
    parser = make_renderer(template, family="auto", family_options={"enable_thinking": False})
    assert (parser.family, parser.mismatch) == ("qwen3", None)


@pytest.mark.parametrize(
    ("family", "options", "complaint"),
    [
        ("qwen3", {"enable_thinkin": False}, "enable_thinkin: Extra inputs are not permitted"),
        ("qwen3", {"enable_thinking": "perhaps"}, "enable_thinking: Input should be a valid boolean"),
        ("nemotron-3", {"truncate_history_thinking": True}, "conflicts with explicit thinking_retention='all'"),
    ],
)
def test_options_that_a_family_does_not_take(make_renderer, family, options, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        make_renderer(family=family, family_options=options)
    assert "renderer.family = " in one_line(caught)


def test_options_that_have_a_key_of_their_own():
    for taken in ("name", "thinking_retention"):
        with pytest.raises(ValidationError, match=f"{taken!r} is set with renderer."):
            RendererConfig(family_options={taken: "all"})


def test_an_option_that_needs_a_name_is_not_dropped(make_renderer):
    options = {"low_effort": True}
    hinted = make_renderer(family="nemotron-3", family_options=options, bridge=False)
    assert "effort: low" in hinted.tokenizer.decode(hinted.render(ASK))
    with pytest.raises(ConfigError, match="does not continue conversations"):  # the hint moves to the newest message
        make_renderer(family="nemotron-3", family_options=options)


def test_thinking_retention_is_what_is_bridged(make_renderer):
    asked = make_renderer(thinking_retention="tool_cycle")
    prompt, said = asked.render(ASK), ids_of(asked, "higher<|im_end|>")
    assert asked.bridge_to_next_turn(prompt, said, [RESULT]) is not None
    assert asked.bridge_to_next_turn(prompt, said, [USER]) is None
    assert make_renderer().bridge_to_next_turn(prompt, said, [USER]) is not None
    assert make_renderer(thinking_retention="template").bridged_tails == asked.bridged_tails


def test_a_policy_that_never_bridges_is_an_error_at_the_start(make_renderer, family_tokens):
    section = {"family": "deepseek-r1", "tokens": family_tokens["deepseek-r1"], "thinking_retention": "template"}
    with pytest.raises(ConfigError, match=r'thinking_retention = "template".*renderer\.bridge = false') as caught:
        make_renderer(**section)
    one_line(caught)
    assert not make_renderer(**section, bridge=False).supports_bridge
    assert make_renderer(**{**section, "thinking_retention": "all"}).supports_bridge


def test_bridging_can_be_turned_off(make_renderer):
    parser = make_renderer(bridge=False)
    assert not parser.supports_bridge
    assert parser.supports_tools
    assert parser.bridge_to_next_turn(parser.render(ASK), ids_of(parser, "x<|im_end|>"), [USER]) is None


# --------------------------------------------------------------------------------------------------------------------
# The package


@pytest.mark.parametrize("version", ["0.1.7", "0.1.13", "0.2.0"])
def test_another_version_is_refused(monkeypatch, model_folder, version):
    monkeypatch.setattr("importlib.metadata.version", {"renderers": version}.__getitem__)
    with pytest.raises(ConfigError, match=rf"{version} is installed; run: pip install 'renderers>=") as caught:
        RendererParser.from_model(model_folder)
    one_line(caught)


@pytest.mark.parametrize("missing", ["renderers", "httpx"])
def test_a_missing_package_is_one_clear_line(missing):
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from rllm_renderers.renderer import RendererParser\n"
        "try: RendererParser.from_model('anywhere')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == f"ConfigError parser 'renderer' needs {missing}; run: pip install 'renderers{VERSIONS}' httpx\n"


def test_the_version_that_is_checked_is_the_one_that_is_required():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert f"renderers{VERSIONS}" in project["dependencies"]
    assert any(needed.startswith("httpx") for needed in project["dependencies"])
    assert load_package().__name__ == "renderers"


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
    with pytest.raises(ValueError, match=r"text only, but a message holds 'image'; set parser = \"chat_template\""):
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
        ("<think>\nwhy", "", "\nwhy", False, [], TRUNCATED),
        ("<think>\nwhy<|im_end|>", "", "\nwhy", False, [], MALFORMED),
        ("<think>", "", "", False, [], TRUNCATED),
        (f"ok{CALL}<|im_end|>", "ok", None, None, [("add", {"a": 1}, "ok")], STOP),
        (f"{CALL}\n{CALL}<|im_end|>", "", None, None, [("add", {"a": 1}, "ok")] * 2, STOP),
        (CALL[:-14], "", None, None, [(None, None, "unclosed_block")], TRUNCATED),
        (CALL[:-14] + "<|im_end|>", "", None, None, [(None, None, "unclosed_block")], MALFORMED),
        ("<tool_call>add(1)</tool_call><|im_end|>", "", None, None, [(None, None, "invalid_json")], STOP),
        ('<tool_call>{"arguments": {}}</tool_call><|im_end|>', "", None, None, [(None, {}, "missing_name")], STOP),
        ('<tool_call>{"name": 3}</tool_call><|im_end|>', "", None, None, [(None, {}, "missing_name")], STOP),
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
            [("add", None, "invalid_json")],
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
    assert not bridged.flags.writeable


def test_a_turn_costs_the_same_however_long_the_conversation_is(make_renderer, monkeypatch):
    parser = make_renderer()
    given = []
    package = parser._renderer

    def bridge(prompt, *args, **kwargs):
        given.append(len(prompt))
        return type(package).bridge_to_next_turn(package, prompt, *args, **kwargs)

    monkeypatch.setattr(package, "bridge_to_next_turn", bridge)
    session, messages = parser.session(tools=[TOOL]), Messages(ASK)
    for _ in range(30):
        session.next_prompt(messages)
        session.record(ids_of(parser, "the quick brown fox " * 20 + CALL + "<|im_end|>"))
        messages.append(session.answer)
        messages.append(RESULT)
    assert session.stats.bridged == 29
    assert max(given) == given[0]


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
