"""The starter model: its tokenizer, its chat format, its warm start and its cache."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import Qwen3Renderer
from rllm_local import starter, warm_start
from rllm_local.engine import LocalEngine
from rllm_local.fused import FusedDecoder
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rllm_core.errors import ConfigError, RunError, UserError
from rllm_core.types import SamplingParams

# Uniform permutations of four letters have an irreducible loss of 0.54 nats per token.
SORT_TARGET_LOSS = 0.72
Conversations = Callable[[random.Random], Iterator[list[dict[str, Any]]]]


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(model_folder)


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_survives_a_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert max(ids, default=0) < len(tokenizer)
    assert tokenizer.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text("abcdefgh0123456789", min_size=1, max_size=12))
def test_letters_and_digits_stay_single(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert [tokenizer.decode([i]) for i in tokenizer.encode(text)] == list(text)


def test_words_of_the_tasks_and_of_the_format_are_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    for word in ("sort", "user", "assistant", "system", *starter.SPECIAL_TOKENS):
        assert len(tokenizer.encode(word)) == 1, word
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_the_model_fits_its_tokenizer(model_folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    assert 100_000 <= model.num_parameters() <= 200_000
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.model_type == "qwen3"
    assert model.config.head_dim == 32
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_the_chat_format(tokenizer: PreTrainedTokenizerFast) -> None:
    tool = {"name": "add", "parameters": {}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert text == (
        "<|im_start|>system\nbe brief\n\ntools:\n"
        '{"name": "add", "parameters": {}}\n'
        'call:\n<tool_call>\n{"name": name, "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n"
    )
    call["function"]["arguments"] = '{"a": 1}'  # type: ignore[index]
    assert tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False) == text
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n")
    for end in range(1, len(messages)):
        part = tokenizer.apply_chat_template(messages[:end], tools=[tool], tokenize=False)
        assert text.startswith(part) or messages[end - 1]["role"] == messages[end]["role"] == "tool"


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [None, "é"]}}}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "sort: dbca\n\n{"}]
CALLED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RETURNED: dict[str, Any] = {"role": "tool", "content": "\n42\n\n"}
PROMPTS = {
    "plain": ASKED,
    "system": [{"role": "system", "content": "be brief"}, *ASKED],
    "several questions": [*ASKED, {"role": "assistant", "content": "abcd"}, *ASKED],
    "a call": [*ASKED, CALLED, RETURNED],
    "text and two calls": [*ASKED, {**CALLED, "content": "hm", "tool_calls": [CALL, CALL]}, RETURNED, RETURNED],
    "reasoning and a call": [*ASKED, {**CALLED, "reasoning_content": "\nhm\n"}, RETURNED],
    "reasoning before a question": [*ASKED, {"role": "assistant", "content": "a", "reasoning_content": "hm"}, *ASKED],
    "two calls in a row, then a question": [*ASKED, CALLED, RETURNED, CALLED, RETURNED, CALLED, *ASKED],
}


@pytest.mark.parametrize("messages", PROMPTS.values(), ids=PROMPTS)
def test_prompts_are_those_of_the_qwen3_renderer(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]
) -> None:
    theirs = Qwen3Renderer(tokenizer).render_ids(messages, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == theirs


def test_the_fixed_part_of_a_call_takes_few_tokens() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
    calls: list[dict[str, Any]] = [
        {"role": "user", "content": "3 plus 4"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "52"},
        {"role": "assistant", "content": "52"},
    ]
    tokenizer = starter.make_tokenizer(lambda rng: repeat(calls), 0)
    (sample,) = warm_start._samples([calls], tokenizer)
    (first, last), answer = sample.turn_spans
    assert [tokenizer.decode([i]) for i in sample.token_ids[first:last]] == [
        *("<tool_call>", "\n", '{"name": "', "add", '", "arguments": {"a": ', "3", ', "b": ', "4", "}}"),
        *("\n", "</tool_call>", "<|im_end|>"),
    ]
    assert [tokenizer.decode([i]) for i in sample.token_ids[slice(*answer)]] == ["5", "2", "<|im_end|>"]


def test_no_token_spans_lines(tokenizer: PreTrainedTokenizerFast) -> None:
    """A text thus keeps its tokens when rendered after another line."""
    assert [word for word in tokenizer.get_vocab() if len(word) > 1 and "\u010a" in word] == []


def test_what_assistants_wrote_is_what_is_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    conversation = [
        {"role": "user", "content": "sort: ba"},
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "assistant\nagain"},
        {"role": "assistant", "content": "a"},
    ]
    (sample,) = warm_start._samples([conversation], tokenizer)
    learned = [tokenizer.decode(sample.token_ids[a:b].tolist()) for a, b in sample.turn_spans]
    assert learned == ["ab<|im_end|>", "a<|im_end|>"]


@pytest.fixture(scope="session")
def starter_folder(
    tmp_path_factory: pytest.TempPathFactory, conversations: Conversations
) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("made") / "starter"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(starter.RECIPE["warm_start"], "target_loss", SORT_TARGET_LOSS)
        return folder, starter.make_starter_model(folder, seed=11, conversations=conversations)


@pytest.mark.slow
def test_the_warm_start_solves_no_more_than_chance(
    starter_folder: tuple[Path, dict[str, float]], conversations: Conversations
) -> None:
    """On held-out words at temperature 1, nearly all answers have the right form, and about one in 24 is sorted."""
    folder, made = starter_folder
    assert made["loss"] < SORT_TARGET_LOSS
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    letters = ["".join(random.Random(seed).choices("abcdefgh", k=4)) for seed in range(600)]
    letters = [word for word in letters if sum(ord(c) * 31**i for i, c in enumerate(word)) % 7 == 0]
    assert len(letters) > 60
    prompts = [
        tokenizer.encode(f"<|im_start|>user\nsort: {word}<|im_end|>\n<|im_start|>assistant\n") for word in letters
    ]
    params = SamplingParams(max_response_tokens=6, stop_token_ids=(tokenizer.eos_token_id,))

    async def answer() -> list[list[str]]:
        with ThreadPoolExecutor(1) as executor:
            engine = LocalEngine(
                FusedDecoder(model, torch.float32),
                None,
                executor,
                device=torch.device("cpu"),
                vocabulary_size=len(tokenizer),
                max_model_tokens=64,
                max_batch_rows=2048,
            )
            outputs = await asyncio.gather(
                *(
                    engine.get_token_outputs_from_token_input(prompt, sampling_params=params, seeds=range(8))
                    for prompt in prompts
                )
            )
        return [[tokenizer.decode(o.token_ids.tolist(), skip_special_tokens=True) for o in part] for part in outputs]

    answers = asyncio.run(answer())
    formed = solved = total = 0
    for word, given_answers in zip(letters, answers, strict=True):
        for text in given_answers:
            formed += sorted(text) == sorted(word)
            solved += text == "".join(sorted(word))
            total += 1
    assert solved / total <= 0.1
    assert formed / total >= 0.7


@pytest.mark.slow
def test_the_same_seed_makes_the_same_model(
    starter_folder: tuple[Path, dict[str, float]], conversations: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(starter.RECIPE["warm_start"], "target_loss", 100.0)
    tokenizer = starter.make_tokenizer(conversations, 0)
    made = []
    for _ in range(2):
        torch.manual_seed(5)
        model = starter.make_model(tokenizer)
        warm_start.warm_start(model, tokenizer, conversations(random.Random(5)), starter.RECIPE["warm_start"])
        made.append(model.state_dict())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_a_warm_start_that_does_not_converge_leaves_nothing(
    tmp_path: Path, conversations: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(starter.RECIPE["warm_start"], "max_steps", 2)
    with pytest.raises(RunError, match="should have fallen below"):
        starter.make_starter_model(tmp_path / "model", conversations=conversations)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cache", ["/dev/full", "/proc/x"])
def test_a_cache_that_cannot_be_written_is_one_line_before_any_work(
    cache: str, conversations: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*args: object, **options: object) -> None:
        raise AssertionError("created a model that cannot be kept")

    monkeypatch.setenv("RLLM_CACHE_DIR", cache)
    monkeypatch.setattr(starter, "_task", lambda task: (conversations, None))
    monkeypatch.setattr(starter, "make_starter_model", work)
    with pytest.raises(ConfigError, match=f"cannot be cached in {cache}/starter: .*; set RLLM_CACHE_DIR") as caught:
        starter.starter_model(0)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_it_is_made_once_per_recipe(
    tmp_path: Path, conversations: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(starter, "_task", lambda task: (conversations, None))
    monkeypatch.setitem(starter.RECIPE["warm_start"], "target_loss", 100.0)
    first = starter.starter_model(0)
    assert first.parent == tmp_path / "starter"
    assert json.loads((first / "starter_recipe.json").read_text())["seed"] == 0
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert starter.starter_model(0) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert starter.starter_model(1) != first
    monkeypatch.setitem(starter.RECIPE["warm_start"], "target_loss", 99.0)
    assert starter.starter_model(0) not in (first, starter.starter_model(1))
    assert not list((tmp_path / "starter").glob(".*"))


def test_threads_make_it_once(tmp_path: Path, conversations: Conversations, monkeypatch: pytest.MonkeyPatch) -> None:
    making, made = threading.Event(), []

    def make(folder: Path, **_: Any) -> None:
        making.set()
        other.join(timeout=0.2)  # it waits for this thread
        made.append(folder)
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")

    def ask_again() -> None:
        making.wait()
        starter.starter_model(0)

    other = threading.Thread(target=ask_again)
    monkeypatch.setenv("RLLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(starter, "_task", lambda task: (conversations, None))
    monkeypatch.setattr(starter, "make_starter_model", make)
    other.start()
    starter.starter_model(0)
    other.join()
    assert len(made) == 1


def test_a_folder_that_is_something_else_is_not_replaced(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="is not a starter model"):
        starter._copy(model_folder, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("task", starter.TASKS)
def test_the_conversations_that_come_with_the_workflows(task: str) -> None:
    chats = list(islice(starter._task(task)[0](random.Random(0)), 50))
    assert all(chat[0]["role"] == "user" and chat[-1]["role"] == "assistant" for chat in chats)


def test_the_plugin_is_light() -> None:
    code = (
        "import rllm_local, rllm_local.config, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
