"""Selection of family, options and package version."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError
from rllm_renderers.package import VERSIONS, load_package
from rllm_renderers.renderer import RendererConfig, RendererParser

from rllm_core.errors import ConfigError

ASK = [{"role": "user", "content": "hello"}]
USER = {"role": "user", "content": "and now?"}
RESULT = {"role": "tool", "tool_call_id": "call_a", "content": "3"}

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
# Families


def test_the_family_is_the_one_that_renders_what_the_template_renders(make_renderer):
    parser = make_renderer(PLAIN_CHATML, family="auto")
    assert parser.family == "qwen3"
    messages = [{"role": "system", "content": "x"}, *ASK, {"role": "assistant", "content": "higher"}, USER]
    assert parser.render(messages) == parser.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )


def test_a_model_can_name_its_family(make_renderer, model_folder):
    path = model_folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"renderer_family": "qwen3"}))
    named = RendererParser.from_model(model_folder)
    assert named.family == "qwen3"
    assert named.mismatch is not None, "which is why it has to be named"
    path.write_text(json.dumps(settings | {"renderer_family": "qwen33"}))
    with pytest.raises(ConfigError, match=r"'qwen33' is unknown \(did you mean 'qwen3'"):
        RendererParser.from_model(model_folder)
    path.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="matches no known family"):
        RendererParser.from_model(model_folder)


@pytest.mark.parametrize(
    "change",
    [
        ("assistant\n' }}", "assistant\n<think>\n' }}"),
        ("m.content +", "m.content | trim +"),
        ("'<|im_start|>' + m.role", "'<|im_start|> ' + m.role"),
    ],
    ids=str,
)
def test_a_template_that_differs_anywhere_is_another_family(make_renderer, change):
    with pytest.raises(ConfigError, match=r"matches no known family.*qwen3 \(other text without tools"):
        make_renderer(PLAIN_CHATML.replace(*change), family="auto")


def test_a_template_of_no_family_is_one_clear_line(parser):
    with pytest.raises(ConfigError) as caught:
        RendererParser(parser.tokenizer, path="m")
    complaint = one_line(caught)
    assert "qwen3 (other text with" in complaint
    assert "kimi-k2" not in complaint  # The tokenizer lacks its tokens, so it is not a candidate.
    assert 'force a family with renderer.family = "..."' in complaint
    assert 'parser = "chat_template"' in complaint


def test_a_template_that_nobody_can_render(make_renderer):
    with pytest.raises(ConfigError, match="does not accept this conversation: no"):
        make_renderer("{{ raise_exception('no') }}", family="auto")


def test_without_a_template_the_family_must_be_named(make_renderer):
    with pytest.raises(ConfigError, match=r"has no chat template.*set renderer\.family to one of qwen3,"):
        make_renderer(family="auto")
    assert make_renderer(family="qwen3").render(ASK)


def test_a_family_that_is_named_is_used_and_says_where_it_differs(parser, make_renderer):
    named = RendererParser(parser.tokenizer, RendererConfig(family="qwen3"))
    assert named.family == "qwen3"
    assert str(named.mismatch).startswith("other text with tools, 1 messages: '<|im_start|>system")
    assert named.supports_bridge


@pytest.mark.parametrize(("opening", "thinking"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False)])
def test_what_the_package_reads_from_a_name_is_read_from_the_template(make_renderer, family_tokens, opening, thinking):
    template = PLAIN_CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n" + opening)
    template = template.replace("m.content", "m.content | trim")
    parser = make_renderer(template, family="auto", tokens=family_tokens["qwen3.5"])
    assert parser.family == "qwen3.5"
    assert parser.family_options["enable_thinking"] is thinking
    # For conversations with answers, the template writes instead of the family.
    asked = [*ASK, {"role": "assistant", "content": "higher"}, USER]
    text = parser.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert parser.tokenizer.decode(parser.render(asked)) == text


def test_a_family_writes_no_reasoning_where_the_template_writes_none(make_renderer):
    parser = make_renderer(PLAIN_CHATML, family="auto")
    asked = [*ASK, {"role": "assistant", "content": "higher", "reasoning_content": "why"}, USER]
    text = parser.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert parser.tokenizer.decode(parser.render(asked)) == text
    elsewhere = PLAIN_CHATML.replace("+ m.content", "+ m.content + (m.reasoning_content or '')")
    mismatch = make_renderer(elsewhere, family="prime-qwen3").mismatch
    assert "There may be more" in str(mismatch)
    assert not mismatch.of_prompt


def test_what_was_resolved_is_told(parser, make_renderer):
    told = {"family": "qwen3", "family_options": {"thinking_retention": "all"}}
    assert make_renderer().describe() == {**told, "chat_template": "none in the model folder"}
    partly = str(make_renderer(PLAIN_CHATML, family="auto").describe()["chat_template"])
    assert partly.startswith("other text without tools, 3 messages: ")
    assert partly.endswith("; so it renders conversations with answers, and the family only first prompts")
    named = RendererParser(parser.tokenizer, RendererConfig(family="qwen3"))
    assert str(named.describe()["chat_template"]).startswith("other text with tools, 1 messages: ")


@pytest.mark.parametrize(
    ("family", "complaint"),
    [
        ("kimi-k2", r"cannot be used with model 'a-model': Special token '<\|im_user\|>' not found.*chat_template"),
        ("deepseek-v3", r"cannot be used with model 'a-model': Expected single token.*chat_template"),
        ("qwen", r"'qwen' is unknown \(did you mean 'qwen3.*choose auto, qwen3, "),
        ("default", r'cannot bridge; set parser = "chat_template"'),
    ],
)
def test_a_family_that_cannot_be_used_is_one_clear_line(make_renderer, family, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        make_renderer(family=family)
    one_line(caught)


@pytest.mark.parametrize(
    ("name", "architecture"), [("Qwen3-8B", "llama"), ("Qwen/Qwen3.5-0.8B", "qwen3"), ("super", "mistral")]
)
def test_names_mean_nothing(make_tokenizer, tmp_path, name, architecture):
    make_tokenizer(PLAIN_CHATML).save_pretrained(tmp_path / name)
    (tmp_path / name / "config.json").write_text(json.dumps({"model_type": architecture}))
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
    with pytest.raises(ConfigError, match=r"config\.json of model .* cannot be read") as caught:
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
    assert parser.family == "qwen3"
    assert not parser.mismatch.of_prompt


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
        with pytest.raises(ValidationError, match=f"{taken!r} must be set with renderer."):
            RendererConfig(family_options={taken: "all"})


def test_an_option_that_needs_a_name_is_not_dropped(make_renderer):
    options = {"low_effort": True}
    hinted = make_renderer(family="nemotron-3", family_options=options, bridge=False)
    assert "effort: low" in hinted.tokenizer.decode(hinted.render(ASK))
    # The hint moves to the latest user message.
    assert {tail.user for tail in make_renderer(family="nemotron-3", family_options=options).bridged_tails} == {False}


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
