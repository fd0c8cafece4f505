"""A model folder without weights: a tokenizer trained on this repository's text, and a chat template.

No third-party vocabulary or template is needed. Like those of reasoning models, the template drops old reasoning after
the next user message, and writes tool calls as JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peer_environments import ROOT

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

TEMPLATE = """\
{%- set last = namespace(query=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor -%}
{%- if tools -%}
{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- else -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content and loop.index0 > last.query -%}
{{ '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
{%- if m.content or not loop.first %}{{ '\\n' }}{% endif -%}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


def corpus() -> list[str]:
    """Returns the documentation and sources of this repository, in a fixed order."""
    patterns = ("docs/*.md", "rllm_core/**/*.py", "plugins/*/rllm_*/**/*.py", "tests/**/*.py", "benchmarks/*.py")
    return [path.read_text(encoding="utf-8") for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def make_tokenizer(texts: list[str], vocabulary_size: int) -> Any:
    """Trains a byte-level BPE tokenizer with the chat tokens of the template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Regex(r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens(TAGS)
    fast.chat_template = TEMPLATE
    return fast


def make_parsers(folder: Path, texts: list[str], vocabulary_size: int) -> dict[str, Any]:
    """Creates both parsers, each with its own copy of the same tokenizer."""
    from rllm_renderers.chat_template import ChatTemplateParser
    from rllm_renderers.renderer import RendererConfig, RendererParser

    make_tokenizer(texts, vocabulary_size).save_pretrained(folder)
    return {
        "chat_template": ChatTemplateParser.from_model(folder),
        "renderer": RendererParser.from_model(folder, RendererConfig(family="qwen3")),
    }
