"""A tiny untrained model in a folder, and samples for it."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch
from rllm_local.config import LocalConfig
from rllm_local.starter import make_model, make_tokenizer

from rllm_core.config import AlgorithmConfig, ModelConfig, OptimizerConfig, RolloutConfig, RunConfig, TrainingConfig
from rllm_core.types import TrainingSample

sys.path.insert(0, str(Path(__file__).with_name("support")))
torch.set_num_threads(1)  # as the backend does for models of this size


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs ``async def`` tests, each in its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


def sort_conversations(rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Yields letters to sort, answered with a random permutation; every seventh item is held out."""
    while True:
        letters = [rng.choice("abcdefgh") for _ in range(4)]
        if is_held_out("".join(letters)):
            continue
        question = f"sort: {''.join(letters)}"
        rng.shuffle(letters)
        yield [{"role": "user", "content": question}, {"role": "assistant", "content": "".join(letters)}]


def is_held_out(letters: str) -> bool:
    return sum(ord(letter) * 31**place for place, letter in enumerate(letters)) % 7 == 0


@pytest.fixture(scope="session")
def conversations() -> Callable[[random.Random], Iterator[list[dict[str, Any]]]]:
    return sort_conversations


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model of the starter's shape, with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(sort_conversations, 0)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = make_model(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run_config(model_folder: Path) -> Callable[..., RunConfig]:
    """A run file; keywords replace sections."""

    def build(local: LocalConfig | None = None, **sections: Any) -> RunConfig:
        defaults: dict[str, Any] = {
            "model": ModelConfig(path=str(model_folder)),
            "training": TrainingConfig(steps=10, groups_per_step=2, rollouts_per_group=4),
            "rollout": RolloutConfig(max_response_tokens=8),
            "algorithm": AlgorithmConfig(),
            "optimizer": OptimizerConfig(learning_rate=1e-3),
        }
        plugins = {"local": local or LocalConfig(device="cpu")}
        return RunConfig(workflow="sort", plugins=plugins, **{**defaults, **sections})

    return build


@pytest.fixture
def samples() -> list[TrainingSample]:
    """Returns three groups: single turn with duplicates, single turn with long answers, several turns."""
    rng = np.random.default_rng(0)
    built = []

    def add(group: int, parts: list[tuple[list[int], bool]], advantage: float) -> None:
        ids: list[int] = []
        spans, advantages = [], []
        for tokens, is_sampled in parts:
            if is_sampled:
                spans.append((len(ids), len(ids) + len(tokens)))
                advantages += [advantage + 0.1 * len(spans)] * len(tokens)
            ids += tokens
        built.append(
            TrainingSample(
                group_id=group,
                rollout_id=str(len(built)),
                token_ids=np.array(ids),
                turn_spans=tuple(spans),
                logprobs=rng.uniform(-6, -4, len(advantages)),
                advantages=np.array(advantages),
                weight_versions=(0,) * len(spans),
            )
        )

    prompt = rng.integers(10, 250, 12).tolist()
    answer = [70, 71, 72, 2]
    for tail in (answer, answer, [70, 71, 75, 2], [70, 90], [91, 2], answer[:3]):
        add(0, [(prompt, False), (tail, True)], float(rng.normal()))
    prompt = rng.integers(10, 250, 5).tolist()
    for _ in range(3):
        add(1, [(prompt, False), (rng.integers(10, 250, 20).tolist(), True)], float(rng.normal()))
    prompt = rng.integers(10, 250, 8).tolist()
    for second in ([60, 2], [61, 2], [60, 2]):
        observation = [5, 80, second[0], 6]
        add(2, [(prompt, False), ([50, 51, 2], True), (observation, False), (second, True)], float(rng.normal()))
    add(3, [(prompt[:3], False), ([44], True)], 1.0)
    return built
