"""Every renderer of the cookbook: same output as the cookbook, contract checks, and drift probes."""

from __future__ import annotations

import inspect
import re

import pytest
from rllm_tinker.parser import TinkerParser
from tinker_cookbook import renderers

from rllm_core.errors import ConfigError
from rllm_devkit.checks import check_parser, probe_drift

# Downloads its own tokenizer.
WITHOUT_A_TOKENIZER = {"tml_v0"}
NAMES = sorted(set(re.findall(r'name == "(\w+)"', inspect.getsource(renderers.get_renderer))) - WITHOUT_A_TOKENIZER)

# Cases that cause a segment break, and why. A test fails if any set grows.
PLAIN = {"text", "text in other tokens", "random tokens", "white space at the edges", "cut off"}
BREAKS = {
    # Separates turns by text; the end-of-sequence token that ends a sampled turn is not in histories.
    "role_colon": PLAIN,
    # The last user message sets the reasoning effort, so another one changes the text before the answer.
    "nemotron3_low_thinking": PLAIN | {"reasoning"},
    "nemotron3_ultra_medium_thinking": PLAIN | {"reasoning"},
    # Answers in histories end with a different token than sampled ones.
    **{name: PLAIN | {"reasoning"} for name in NAMES if name.startswith("gpt_oss")},
    # A call without text has no end token in histories, although the model samples one.
    "deepseekv3_thinking": {"tool call", *(f"tool call, {how} JSON" for how in ("compact", "indented", "escaped"))},
}
TAILS = {
    "role_colon": set(),
    "nemotron3_low_thinking": {"tool", "tool, tool"},
    "nemotron3_ultra_medium_thinking": {"tool", "tool, tool"},
    **{name: {"tool", "tool, user"} for name in NAMES if name.startswith("gpt_oss")},
    **{name: {"user"} for name in NAMES if name.startswith("deepseekv3")},
}

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "hello world"}
USER = {"role": "user", "content": "higher or lower?"}
CALL = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "functions.add:0", "name": "add", "content": "3"}
SAYS = {"role": "assistant", "content": "the quick brown fox"}
THINKS = {**SAYS, "reasoning_content": "why"}
CALLS = {"role": "assistant", "content": "so", "tool_calls": [CALL]}


@pytest.fixture(scope="module", params=NAMES)
def parser(request, make_parser) -> TinkerParser:
    return make_parser(request.param)


def written_by_the_cookbook(parser, make_tokenizer_of, messages, tools):
    """Output of the cookbook's renderer, with the transformers tokenizer and the cookbook's types."""
    renderer = renderers.get_renderer(parser.renderer, make_tokenizer_of(parser.renderer))
    own = []
    for message in messages:
        content = message["content"]
        if message.get("reasoning_content"):
            thought = renderers.ThinkingPart(type="thinking", thinking=message["reasoning_content"])
            content = [thought, renderers.TextPart(type="text", text=content)]
        converted = renderers.Message(role=message["role"], content=content)
        if "tool_calls" in message:
            converted["tool_calls"] = [renderers.ToolCall.model_validate(call) for call in message["tool_calls"]]
        own.append(converted | {key: message[key] for key in ("tool_call_id", "name") if key in message})
    if tools:
        own = [*renderer.create_conversation_prefix_with_tools([tool["function"] for tool in tools]), *own]
    return renderer.build_generation_prompt(own).to_ints()


# With its own system prompt, the renderer puts the workflow's into the developer message, as intended.
@pytest.mark.filterwarnings("ignore:use_system_prompt=True")
def test_conversations_are_written_as_the_cookbook_writes_them(parser, make_tokenizer_of):
    reasons = parser.renderer not in ("role_colon", "llama3")
    answers = [SAYS, *([THINKS] if reasons else [])]
    conversations = [([SYSTEM, ASK], None), *(([ASK, answer, USER], None) for answer in answers)]
    if parser.supports_tools:
        conversations += [([ASK], [TOOL]), ([ASK, CALLS, RESULT], [TOOL]), ([ASK, CALLS, RESULT, SAYS, USER], [TOOL])]
    else:
        assert parser.renderer in ("role_colon", "llama3")
    for messages, tools in conversations:
        expected = written_by_the_cookbook(parser, make_tokenizer_of, messages, tools)
        assert parser.render(messages, tools=tools) == expected


def test_the_contract_and_drift(parser):
    results = check_parser(parser, examples=15)
    assert [result for result in results if result.outcome == "failed"] == []
    expected = BREAKS.get(parser.renderer, set())
    lost = {drift.completions for drift in probe_drift(parser, conversations=1, turns=3) if drift.lost}
    assert lost <= expected
    assert bool(lost) == bool(expected)


def test_bridges(parser):
    from rllm_devkit.checks.parsers import bridged_tails

    assert set(bridged_tails(parser)) == TAILS.get(parser.renderer, {"user", "tool", "tool, tool", "tool, user"})


def test_a_tokenizer_of_another_family_is_refused(make_tokenizer):
    plain = make_tokenizer()
    for name in ("llama3", "kimi_k2", "deepseekv3", "gpt_oss_low_reasoning", "glm5_3_max_reasoning", "tml_v0"):
        with pytest.raises(ConfigError, match=f"tinker.renderer = '{name}' cannot be used with this model's tokenizer"):
            TinkerParser(plain, name)
