from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from rllm_renderers.chat_template import ChatTemplateConfig, ChatTemplateParser
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

# A ChatML dialect like those of reasoning models: old reasoning is dropped once a user speaks again.
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
    """A byte-level BPE trained on a few lines: every text can be written, and non-canonical spellings exist."""
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
    """A tokenizer that writes the beginning of a text differently from its middle, as SentencePiece's do."""
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


@pytest.fixture
def model_folder(tmp_path, byte_tokenizer_json):
    """A folder as `save_pretrained` leaves it, without weights."""
    folder = tmp_path / "model"
    wrap(Tokenizer.from_str(byte_tokenizer_json), CHATML).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return folder
