from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from rllm_renderers.chat_template import ChatTemplateConfig, ChatTemplateParser
from rllm_renderers.renderer import RendererConfig, RendererParser
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

# The same examples in every run, and no machine is too slow for them.
settings.register_profile(
    "tests", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

# A ChatML dialect as in reasoning models: old reasoning is dropped after the next user message.
CHATML = """\
{%- set last = namespace(user=0) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor -%}
{%- if tools -%}
{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- elif m.role in ('user', 'assistant', 'system') -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content and loop.index0 > last.user -%}
{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ m.content }}
{%- for c in m.tool_calls or [] -%}
{{ '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- (c.function.arguments if c.function.arguments is string else c.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- else -%}{{ raise_exception('unknown role ' + m.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}{% if thinking %}{{ '<think>\\n' }}{% endif %}
{%- endif -%}
"""

CORPUS = [
    "user assistant system tool_response look_up name arguments What is it now? Let me see. Go on, please!",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}\n\nhello world, higher or lower?\nthe quick brown fox',
    "0 1 2 3 4 5 6 7 8 9 zwölf Boxkämpfer",
] * 4


def byte_level() -> Tokenizer:
    """Trains a byte-level BPE on a few lines: any text can be encoded, and non-canonical encodings exist."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """Makes a tokenizer that encodes the beginning of a text differently from its middle, like SentencePiece."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL + bytes_, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def wrap(tokenizer: Tokenizer, template: str | None, eos: str = "<|im_end|>") -> Any:
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token="<|endoftext|>")
    wrapped.add_tokens(TAGS)
    wrapped.chat_template = template
    return wrapped


MakeParser = Callable[..., ChatTemplateParser]


@pytest.fixture(scope="session")
def byte_tokenizer_json() -> str:
    return byte_level().to_str()


@pytest.fixture(scope="session")
def make_parser(byte_tokenizer_json: str) -> MakeParser:
    """``make_parser(template, stops=("<|im_end|>",), tokenizer=None, **section)``."""

    def make(
        template: str = CHATML,
        *,
        stops: tuple[str, ...] = ("<|im_end|>",),
        tokenizer: Tokenizer | None = None,
        **section: Any,
    ) -> ChatTemplateParser:
        wrapped = wrap(tokenizer or Tokenizer.from_str(byte_tokenizer_json), template, stops[0])
        ids = [wrapped.convert_tokens_to_ids(stop) for stop in stops]
        return ChatTemplateParser(wrapped, ids, ChatTemplateConfig(**section))

    return make


@pytest.fixture(scope="session")
def parser(make_parser: MakeParser) -> ChatTemplateParser:
    return make_parser(stops=("<|im_end|>", "<|endoftext|>"))


FAMILIES = tomllib.loads((Path(__file__).parent / "templates" / "families.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def families() -> dict[str, Any]:
    return FAMILIES


@pytest.fixture(scope="session")
def make_family_parser(byte_tokenizer_json: str) -> MakeParser:
    """``make_family_parser(name, **section)``: with one of the templates in ``templates``."""

    def make(name: str, **section: Any) -> ChatTemplateParser:
        family = FAMILIES[name]
        template = Path(__file__).parent / "templates" / f"{family.get('template', name)}.jinja"
        wrapped = wrap(Tokenizer.from_str(byte_tokenizer_json), template.read_text(encoding="utf-8").rstrip("\n"))
        wrapped.add_special_tokens({"extra_special_tokens": family["tokens"]})
        wrapped.eos_token = family["stops"][0]
        section.setdefault("chat_template_kwargs", family.get("variables", {}))
        stops = [wrapped.convert_tokens_to_ids(stop) for stop in family["stops"]]
        return ChatTemplateParser(wrapped, stops, ChatTemplateConfig(**section))

    return make


@pytest.fixture
def model_folder(tmp_path, byte_tokenizer_json):
    """Returns a folder as written by `save_pretrained`, without weights."""
    folder = tmp_path / "model"
    wrap(Tokenizer.from_str(byte_tokenizer_json), CHATML).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return folder


@pytest.fixture(scope="session")
def make_tokenizer(byte_tokenizer_json: str) -> Callable[..., Any]:
    """``make_tokenizer(template=None, tokens=(), eos="<|im_end|>")``: with ChatML's tokens and additional ones."""

    def make(template: str | None = None, tokens: Sequence[str] = (), eos: str = "<|im_end|>") -> Any:
        wrapped = wrap(Tokenizer.from_str(byte_tokenizer_json), template)
        wrapped.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
        wrapped.eos_token = eos
        return wrapped

    return make


@pytest.fixture(scope="session")
def make_renderer(make_tokenizer: Callable[..., Any]) -> Callable[..., RendererParser]:
    """``make_renderer(template=None, tokens=(), eos=..., **section)``; family qwen3 by default."""

    def make(
        template: str | None = None, *, tokens: Sequence[str] = (), eos: str = "<|im_end|>", **section: Any
    ) -> RendererParser:
        config = RendererConfig(**{"family": "qwen3", **section})
        return RendererParser(make_tokenizer(template, tokens, eos), config, path="a-model")

    return make


@pytest.fixture(scope="session")
def renderer(make_renderer: Callable[..., RendererParser]) -> RendererParser:
    return make_renderer()


_BAR = "\N{FULLWIDTH VERTICAL LINE}"
_VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_ARGUMENTS = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
_GLM = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", *_ARGUMENTS]
_KIMI = [f"<|im_{role}|>" for role in ("user", "assistant", "system", "middle")] + [
    f"<|tool_{part}|>"
    for part in ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end")
]
_LAGUNA = ["〈|EOS|〉", "<assistant>", "</assistant>"]
_DEEPSEEK = [f"<{_BAR}{name}{_BAR}>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")]
_DEEPSEEK_TOOLS = [
    f"<{_BAR}tool▁{name}{_BAR}>"
    for name in (
        *("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"),
        *("outputs▁begin", "outputs▁end", "output▁begin", "output▁end"),
    )
]
_HY3 = [
    f"<{name}:opensource{end}>"
    for name, end in [
        *((f"{_BAR}hy_{name}", _BAR) for name in ("begin_of_sentence", "eos", "User", "Assistant")),
        (f"{_BAR}reasoning_mode", _BAR),
        *(
            (slash + name, "")
            for name in ("think", "tool_calls", "tool_call", "arg_key", "arg_value", "tool_responses", "tool_response")
            for slash in ("", "/")
        ),
        ("tool_sep", ""),
    ]
]


@pytest.fixture(scope="session")
def family_tokens() -> dict[str, list[str]]:
    """Returns the special tokens of each family of the package, except ChatML's."""
    return {
        "qwen3": [],
        "prime-qwen3": [],
        "nemotron-3": [],
        "nemotron-3-ultra": [],
        "nemotron-3.5": [],
        **dict.fromkeys(("qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"), _VISION),
        **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), _GLM),
        "kimi-k2": _KIMI,
        "kimi-k2.5": [*_KIMI, *(f"<|media_{part}|>" for part in ("begin", "content", "pad", "end"))],
        **dict.fromkeys(("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"), _LAGUNA),
        "deepseek-v3": [*_DEEPSEEK, *_DEEPSEEK_TOOLS],
        "deepseek-r1": [*_DEEPSEEK, *_DEEPSEEK_TOOLS],
        "deepseek-v4": [
            *_DEEPSEEK,
            f"{_BAR}DSML{_BAR}",
            *(
                f"<{_BAR}{name}{_BAR}>"
                for name in ("latest_reminder", "action", "query", "authority", "domain", "title", "read_url")
            ),
        ],
        "hy3": _HY3,
        "llama-3": [
            f"<|{name}|>"
            for name in ("begin_of_text", "start_header_id", "end_header_id", "eot_id", "end_of_text", "eom_id")
        ],
        "minimax-m2": ["]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"],
        "gemma4": ["<bos>", "<eos>"]
        + [
            form.format(name)
            for name in ("turn", "channel", "tool", "tool_call", "tool_response", "image")
            for form in ("<|{}>", "<{}|>")
        ]
        + ["<|think|>", "<|image|>"],
        "inkling": [f"<|message_{role}|>" for role in ("user", "model", "system", "tool")]
        + [
            f"<|content_{kind}|>"
            for kind in ("text", "thinking", "image", "audio_input", "xml", "invoke_tool_json", "invoke_tool_text")
        ]
        + ["<|content_model_end_sampling|>", "<|end_message|>", "<|audio_end|>"]
        + ["<|unused_200054|>", "<|unused_200053|>"],
        "gpt-oss": [f"<|{name}|>" for name in ("start", "end", "return", "call", "channel", "message", "constrain")],
    }
