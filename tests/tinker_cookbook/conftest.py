"""Parsers with each of the cookbook's renderers, on a small tokenizer with all their control tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from rllm_tinker.config import TinkerConfig
from rllm_tinker.parser import TinkerParser
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
CORPUS = [
    "user assistant system tool_response look_up name arguments What is it now? Let me see. Go on, please!",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}\n\nhello world, higher or lower?\nthe quick brown fox',
    "0 1 2 3 4 5 6 7 8 9 zwölf Boxkämpfer",
] * 4
_BAR = "\N{FULLWIDTH VERTICAL LINE}"
LLAMA = [f"<|{name}|>" for name in ("begin_of_text", "start_header_id", "end_header_id", "eot_id")]
GLM = [
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
]
KIMI = [f"<|im_{role}|>" for role in ("user", "assistant", "system", "middle")] + [
    f"<|tool_{part}|>"
    for part in ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end")
]
DEEPSEEK = [
    f"<{_BAR}{name}{_BAR}>"
    for name in (
        *("begin▁of▁sentence", "end▁of▁sentence", "System", "User", "Assistant"),
        *("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep"),
        *("tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end"),
    )
]
HARMONY = [f"<|{name}|>" for name in ("start", "end", "return", "call", "channel", "message", "constrain")]
TOKENS = {"llama": LLAMA, "glm": GLM, "kimi": KIMI, "deepseek": DEEPSEEK, "gpt_oss": HARMONY}


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    """A byte-level BPE trained on a few lines: it can encode any text, and non-canonical tokenizations exist."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return str(tokenizer.to_str())


@pytest.fixture(scope="session")
def make_tokenizer(tokenizer_json: str) -> Callable[..., Any]:
    """``make_tokenizer(*families)``: tokenizer with ChatML's tokens, and those of families of `TOKENS`."""

    def make(*families: str) -> Any:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(tokenizer_json), eos_token="<|im_end|>", pad_token="<|endoftext|>"
        )
        tokenizer.add_tokens(TAGS)
        tokenizer.add_tokens(
            [AddedToken(token, special=True, normalized=False) for family in families for token in TOKENS[family]]
        )
        return tokenizer

    return make


@pytest.fixture(scope="session")
def make_tokenizer_of(make_tokenizer: Callable[..., Any]) -> Callable[[str], Any]:
    """``make_tokenizer_of(renderer)``: tokenizer with the tokens that a renderer needs."""
    return lambda renderer: make_tokenizer(*(family for family in TOKENS if renderer.startswith(family)))


@pytest.fixture(scope="session")
def make_parser(make_tokenizer_of: Callable[[str], Any]) -> Callable[..., TinkerParser]:
    """``make_parser(renderer, **section)``: parser with this renderer and section."""

    def make(renderer: str = "qwen3", **section: Any) -> TinkerParser:
        return TinkerParser(make_tokenizer_of(renderer), renderer, TinkerConfig(**section))

    return make


@pytest.fixture(scope="session")
def parser(make_parser: Callable[..., TinkerParser]) -> TinkerParser:
    return make_parser()
