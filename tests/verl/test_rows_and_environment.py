"""Input of the workers: rows, balanced over ranks and without padding, and environment variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rllm_verl import verl_api
from rllm_verl.batch import PADDING_ID, lay_out
from rllm_verl.cluster import worker_environment
from rllm_verl.config import VerlConfig

from rllm_core.types import TrainingSample

NO_SETTINGS: dict[str, Any] = {"temperature": 1.0}


def sample(rng: np.random.Generator, prompt: int, *turns: int) -> TrainingSample:
    """A sample with turns of the given lengths, each followed by two environment tokens; a third are the padding id."""
    spans, end = [], prompt
    for length in turns:
        spans.append((end, end + length))
        end += length + 2
    tokens = np.where(rng.random(end) < 1 / 3, PADDING_ID, rng.integers(1, 50, end))
    count = sum(turns)
    return TrainingSample(
        group_id=0,
        rollout_id="any",
        token_ids=tokens,
        turn_spans=tuple(spans),
        logprobs=rng.uniform(-3, -1, count),
        advantages=rng.normal(size=count),
        weight_versions=(0,) * len(turns),
    )


@pytest.fixture(scope="module")
def samples() -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    lengths = [(3, 40), (3, 2), (5, 4, 30), (2, 1), (4, 35), (1, 3, 1), (6, 33)]
    return [sample(rng, prompt, *turns) for prompt, *turns in lengths]


@pytest.mark.parametrize(("ranks", "mini_batches"), [(1, 1), (1, 5), (2, 1), (2, 3), (4, 1)])
def test_rows_reach_verl_without_padding_and_come_back_in_order(
    samples: list[TrainingSample], ranks: int, mini_batches: int
) -> None:
    rows = lay_out(samples, ranks=ranks, mini_batches=mini_batches, max_tokens=64)
    assert len(rows.tokens) % (ranks * mini_batches) == 0
    data = rows.to_verl(NO_SETTINGS)
    sent = [tokens.numpy() for tokens in data["input_ids"].unbind()]
    for each, row in zip(samples, rows.row_of_sample, strict=True):
        np.testing.assert_array_equal(sent[row], each.token_ids[: each.turn_spans[-1][1]])
    left = set(range(len(sent))) - set(rows.row_of_sample.tolist())
    assert all(rows.tensors["response_mask"][row].sum() == 0 for row in left)
    # A model scores the next token at each position; this is verl's own conversion back.
    said = [torch.zeros(len(tokens)) for tokens in sent]
    for each, row in zip(samples, rows.row_of_sample, strict=True):
        said[row][np.flatnonzero(each.loss_mask) - 1] = torch.tensor(each.logprobs)
    nested = torch.nested.as_nested_tensor(said, layout=torch.jagged)
    found = rows.sampled(verl_api.use("no_padding_2_padding")(nested, data))
    for each, values in zip(samples, found, strict=True):
        np.testing.assert_array_equal(values, each.logprobs)


def test_ranks_get_about_as_many_tokens_each(samples: list[TrainingSample]) -> None:
    tokens = np.array(lay_out(samples, ranks=2, mini_batches=1, max_tokens=64).tokens)
    as_given = np.array([*(each.turn_spans[-1][1] for each in samples), 2])
    first, second = tokens.reshape(2, -1).sum(1)
    assert abs(first - second) <= 4
    assert abs(np.subtract(*as_given.reshape(2, -1).sum(1))) > 4, "there is nothing to balance"


KEYS = ("WANDB_API_KEY", "OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "TINKER_API_KEY", "VLLM_API_KEY")


def test_workers_get_what_they_need_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"RLLM_PLUGINS": "verl", "HF_HOME": "hub", "VLLM_LOGGING_LEVEL": "INFO", "NCCL_SOCKET_IFNAME": "eth0"}
    for name in (*KEYS, "LD_PRELOAD", "EDITOR"):
        monkeypatch.setenv(name, "secret")
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    found = worker_environment(VerlConfig())
    assert wanted.items() <= found.items()
    assert "secret" not in found.values()
    named = worker_environment(VerlConfig(environment=("WANDB_API_KEY", "EDITOR", "NOT_SET")))
    assert {name for name, value in named.items() if value == "secret"} == {"WANDB_API_KEY", "EDITOR"}
    assert "NOT_SET" not in named


def test_vllms_compiled_programs_are_not_shared_and_nccls_memory_neither_where_weights_travel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "0")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    colocated = worker_environment(VerlConfig())
    separated = worker_environment(VerlConfig(placement="separated"))
    assert (colocated["VLLM_DISABLE_COMPILE_CACHE"], separated["VLLM_DISABLE_COMPILE_CACHE"]) == ("1", "1")
    assert "NCCL_CUMEM_ENABLE" not in colocated
    assert separated["NCCL_CUMEM_ENABLE"] == "0"


def test_plugins_are_loaded_in_every_process_beside_what_is_loaded_there_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "cpu_platform")
    once = worker_environment(VerlConfig())["VERL_USE_EXTERNAL_MODULES"]
    assert once == "cpu_platform,rllm_verl.worker_process"
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", once)
    assert worker_environment(VerlConfig())["VERL_USE_EXTERNAL_MODULES"] == once
