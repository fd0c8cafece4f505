"""Both parsers, for every family that can be built here, checked against the contract and probed for drift."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from rllm_renderers.package import family_names

from rllm_core.cli import Session, cli
from rllm_devkit.checks import check_parser, probe_drift

TEMPLATES = (
    *("glm", "llama", "mistral", "gemma", "deepseek", "harmony", "harmony_final"),
    *("qwen_thinking", "qwen_not_thinking"),
)
# Families without a bridge, and one whose vocabulary has to be downloaded; see test_families.py.
RENDERERS = sorted(set(family_names()) - {"laguna-xs.2", "laguna-m.1", "gpt-oss"})

# Causes of segment breaks. The test fails if one is added.
PLAIN = {"text", "text in other tokens", "random tokens", "white space at the edges", "cut off"}
BREAKS = {
    # Tools come before the last user message, so a new user message moves them.
    "mistral": PLAIN,
    # The template ends old answers with a token that differs from the one the model samples.
    "harmony": PLAIN,
    "harmony_final": PLAIN,
}


# The prompts of these open the reasoning. An answer that stops without closing it is written otherwise later on: there
# the family closes the reasoning first.
LEFT_OPEN = {name: PLAIN - {"cut off"} for name in ("glm-5", "glm-5.1")}


def failed(parser, *, examples=40, **options):
    return [result for result in check_parser(parser, examples=examples, **options) if result.outcome == "failed"]


def lost(parser, *, conversations=2, **options):
    drifts = probe_drift(parser, conversations=conversations, turns=3, **options)
    return {drift.completions for drift in drifts if drift.lost}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_both_parsers_keep_the_contract(parser, renderer, seed):
    for either in (parser, renderer):
        assert failed(either, seed=seed) == []
        assert lost(either, seed=seed) == set()


def test_the_baseline_loses_what_the_sessions_keep(parser):
    drifts = {drift.completions: drift for drift in probe_drift(parser)}
    always = {"random tokens", "reasoning", "tool call, compact JSON", "tool call, indented JSON"}
    assert all(drifts[kind].lost_rerendered == drifts[kind].turns for kind in always)
    assert drifts["text"].lost_rerendered == 0


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates(make_family_parser, families, name):
    assert set(TEMPLATES) == set(families)
    parser = make_family_parser(name)
    assert failed(parser) == []
    expected = BREAKS.get(name, set())
    assert lost(parser) <= expected
    assert bool(lost(parser)) == bool(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", RENDERERS)
def test_renderers(make_renderer, family_tokens, name):
    parser = make_renderer(family=name, tokens=family_tokens[name])
    assert failed(parser, examples=20) == []
    assert lost(parser, conversations=1) == LEFT_OPEN.get(name, set())


def test_a_parser_without_protection_fails_the_check_of_control_tokens(make_parser, monkeypatch):
    parser = make_parser()
    monkeypatch.setattr(parser.template.encoder, "protect", lambda messages, placeholder: list(map(dict, messages)))
    [result] = [result for result in failed(parser) if result.name != "copies"]
    assert result.name == "control tokens"
    assert "<|im_end|> in the text of a user becomes control token " in result.detail


@pytest.mark.slow
def test_without_a_bridge_the_verdict_is_not_exact(model_folder):
    def check(*arguments):
        return CliRunner().invoke(cli, ["parser", "check", str(model_folder), *arguments], obj=Session())

    exact, anew = check("--json"), check("--parser", "chat_template", "-o", "chat_template.bridge=false")
    report = json.loads(exact.output)
    assert exact.exit_code == 0, exact.output
    assert report["parser"] == "chat_template"
    assert report["stop_tokens"][0]["text"] == "<|im_end|>"
    assert report["bridged_tails"] == ["user", "tool", "tool, tool", "tool, user"]
    assert anew.exit_code == 1
    assert anew.output.splitlines()[-1].startswith("NOT exact: ")
