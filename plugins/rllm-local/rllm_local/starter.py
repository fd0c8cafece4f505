"""The starter model: a Qwen3 with about 0.15 M parameters that writes the chat format and knows nothing else.

It is an ordinary Hugging Face folder, made on demand and cached by the hash of its recipe::

    python -m rllm_local.starter --out starter-model

Two choices make it learn reliably with RL. Weights are initialized at about ``0.8 / sqrt(hidden)``, because
transformers' default of 0.02 is far too small for 64 dimensions. The warm start stops at a target loss, not after a
number of steps. It teaches form only: answers are random (a permutation of the letters to sort, a guess, a tool call),
so the model solves tasks about as often as chance. A workflow with its own conversations (`Workflow.warm_start`) gets
its own starter model; its loss has no known target, so the warm start stops when the loss no longer falls.

The chat format is that of Qwen3, so the template and the package's Qwen3 renderer write the same tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rllm_core.errors import ConfigError, UserError
from rllm_local.model import one_model_at_a_time
from rllm_local.warm_start import Conversation, warm_start

Conversations = Callable[[random.Random], Iterator[Conversation]]

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
# Pre-tokens: JSON keys with the punctuation around them, words, other runs of JSON punctuation, and any other single
# character, including digits.
PRE_TOKENS = r"""(?:["}\], ]*[{,] ?"[a-z]+": "?)+|[A-Za-z]+|["{}\[\]:, ]+|(?m:.)"""
VOCABULARY_CONVERSATIONS = 3000
VOCABULARY_MIN_FREQUENCY = 30

TASKS = {"starter": "rllm_workflows.warm_start", "countdown": "rllm_workflows.countdown_warm_start"}
"""Modules with the warm-start conversations of each task."""

RECIPE: dict[str, Any] = {
    "format": 4,
    "model": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 192,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "rope_theta": 10000.0,
    },
    "warm_start": {
        "conversations_per_step": 32,
        "learning_rate": 3e-3,
        "warmup_steps": 10,
        "loss_decay": 0.9,
        "target_loss": 0.49,
        "max_steps": 1000,
        "cool_down_steps": 40,
        "final_learning_rate_fraction": 0.1,
    },
}

NO_TARGET = 0.0
WITHOUT_TARGET = {"target_loss": NO_TARGET, "window_steps": 40, "least_progress": 0.02}
"""Settings of a warm start without a target loss: it has converged when the mean loss over a window of steps is less
than this share below that of the best earlier window."""


def starter_model(seed: int = 0, task: str = "starter", conversations: Conversations | None = None) -> Path:
    """Returns the folder of the starter model, and creates the model if it is not cached.

    Args:
        seed: Seed of the weights and the warm start.
        task: Task of the warm start, a key of ``TASKS``.
        conversations: Conversations of the warm start, instead of those of a task.

    Raises:
        UserError: If rllm-workflows, which provides the conversations, is not installed, or the cache is not writable.
    """
    conversations, target_loss = _task(task) if conversations is None else (conversations, NO_TARGET)
    folder = _folder(seed, conversations, target_loss)
    try:
        with one_model_at_a_time():
            if not (folder / "config.json").is_file():
                folder.parent.mkdir(parents=True, exist_ok=True)  # Fail early if the cache is not writable.
                print("making the starter model, which is then cached ...", file=sys.stderr, flush=True)
                make_starter_model(folder, seed=seed, conversations=conversations, target_loss=target_loss)
    except OSError as error:
        raise ConfigError(
            f"the starter model cannot be cached in {folder.parent}: {error.strerror or error}; set RLLM_CACHE_DIR to "
            "a writable folder, or model.path to your own model"
        ) from error
    return folder


def shared_folder(seed: int) -> Path:
    """Returns the folder of the starter model for workflows without their own conversations, created or not."""
    return _folder(seed, *_task("starter"))


def cache_dir() -> Path:
    """Returns ``$RLLM_CACHE_DIR``, or ``rllm-core`` in the user's cache folder."""
    configured = os.environ.get("RLLM_CACHE_DIR")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rllm-core"


def make_starter_model(
    folder: Path,
    *,
    seed: int = 0,
    conversations: Conversations | None = None,
    target_loss: float | None = None,
) -> dict[str, float]:
    """Writes the starter model to ``folder``, which appears only when complete.

    Args:
        folder: Output folder.
        seed: Seed of the weights and the warm start.
        conversations: Conversations of the warm start. Defaults to those of task ``starter``.
        target_loss: Loss at which the warm start has converged, in nats per target token. Defaults to that of
            ``RECIPE``. With `NO_TARGET`, it has converged when its loss no longer falls.

    Returns:
        ``parameters``, ``steps`` and final ``loss`` of the warm start.

    Raises:
        RunError: If the warm start did not converge.
    """
    conversations = conversations or _task("starter")[0]
    tokenizer = make_tokenizer(conversations, seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            model = make_model(tokenizer)
            settings = _warm_start_settings(target_loss)
            steps, loss = warm_start(model, tokenizer, conversations(random.Random(seed)), settings)
    finally:
        torch.set_num_threads(threads)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        with one_model_at_a_time():
            model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        recipe = json.dumps(_recipe(seed, conversations, target_loss), indent=1, sort_keys=True)
        (temporary / "starter_recipe.json").write_text(recipe + "\n", encoding="utf-8")
        temporary.chmod(0o755)
        if folder.is_dir():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # Otherwise another process finished the same recipe first.
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {"parameters": float(model.num_parameters()), "steps": float(steps), "loss": loss}


# --------------------------------------------------------------------------------------------------------------------
# Tokenizer


def make_tokenizer(conversations: Conversations, seed: int) -> PreTrainedTokenizerFast:
    """Makes a byte-level tokenizer with the frequent words of the conversations.

    A word in the vocabulary is a single token, never built from parts. The letters of any other string stay single
    tokens, and any text survives a round trip.
    """
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    counter = Tokenizer(models.WordLevel(unk_token=None))
    counter.pre_tokenizer = split
    trainer = trainers.WordLevelTrainer(min_frequency=VOCABULARY_MIN_FREQUENCY, show_progress=False)
    chats = islice(conversations(random.Random(seed)), VOCABULARY_CONVERSATIONS)
    counter.train_from_iterator((_plain_text(chat) for chat in chats), trainer)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = sorted(word for word in counter.get_vocab() if len(word) > 1)
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token.startswith("<|")],
        model_max_length=RECIPE["model"]["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        renderer_family="qwen3",  # Parser "renderer" cannot detect it: its tool listing differs from Qwen3's.
    )
    fast.add_tokens([token for token in SPECIAL_TOKENS if not token.startswith("<|")])
    fast.chat_template = _template()
    return fast


def _plain_text(conversation: Conversation) -> str:
    """Returns all words of a conversation, including those of the chat format."""
    calls = [call["function"] for message in conversation for call in message.get("tool_calls") or []]
    parts = [f"{message['role']}\n{message.get('content') or ''}" for message in conversation]
    return "\n".join(["system user assistant tools call name arguments", *parts, *map(json.dumps, calls)])


def _template() -> str:
    return files("rllm_local").joinpath("starter_template.jinja").read_text(encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------------
# Model


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Makes a fresh model with exactly the tokenizer's vocabulary."""
    settings = dict(RECIPE["model"])
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": settings.pop("rope_theta")},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **settings,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


# --------------------------------------------------------------------------------------------------------------------
# Recipe


def _task(task: str) -> tuple[Conversations, float | None]:
    """Returns the warm-start conversations of a task, and its target loss if it differs from that of ``RECIPE``."""
    try:
        module = import_module(TASKS[task])
    except ModuleNotFoundError as error:
        raise UserError(
            "the starter model's warm start needs rllm-workflows: pip install 'rllm-local[starter]', or set model.path"
        ) from error
    return module.conversations, getattr(module, "TARGET_LOSS", None)


def _warm_start_settings(target_loss: float | None) -> dict[str, Any]:
    settings: dict[str, Any] = RECIPE["warm_start"]
    if target_loss == NO_TARGET:
        return settings | WITHOUT_TARGET
    return settings if target_loss is None else {**settings, "target_loss": target_loss}


def _recipe(seed: int, conversations: Conversations, target_loss: float | None) -> dict[str, Any]:
    """Returns everything that determines the model; its hash names the cached folder."""
    examples = json.dumps(list(islice(conversations(random.Random(seed)), 200)))
    return {
        **RECIPE,
        "warm_start": _warm_start_settings(target_loss),
        "seed": seed,
        "special_tokens": list(SPECIAL_TOKENS),
        "pre_tokens": PRE_TOKENS,
        "vocabulary": [VOCABULARY_CONVERSATIONS, VOCABULARY_MIN_FREQUENCY],
        "template_sha256": hashlib.sha256(_template().encode()).hexdigest(),
        "conversations_sha256": hashlib.sha256(examples.encode()).hexdigest(),
    }


def _folder(seed: int, conversations: Conversations, target_loss: float | None) -> Path:
    recipe = _recipe(seed, conversations, target_loss)
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "starter" / digest


def main() -> None:
    """Make the starter model, or find it in the cache, and print its folder."""
    parser = argparse.ArgumentParser(prog="python -m rllm_local.starter", description=main.__doc__)
    parser.add_argument("--out", type=Path, help="folder to copy the model to; by default it stays in the cache")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--task", choices=TASKS, default="starter", help="task of the warm start; countdown has two numbers up to 50"
    )
    arguments = parser.parse_args()
    try:
        folder = starter_model(arguments.seed, arguments.task)
        if arguments.out is not None:
            _copy(folder, arguments.out)
            folder = arguments.out
    except UserError as error:
        parser.exit(error.exit_code, f"{error}\n")
    print(folder)


def _copy(source: Path, target: Path) -> None:
    """Copies a folder so that it appears only when complete, replacing an existing one."""
    if target.exists() and not (target / "starter_recipe.json").is_file():
        raise UserError(f"{target} exists and is not a starter model")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    shutil.copytree(source, temporary, dirs_exist_ok=True)
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)


if __name__ == "__main__":
    main()
