"""The check after a weight sync, with servers that compute more or less what the trainer computes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rllm_renderers.chat_template import ChatTemplateParser
from rllm_verl.canary import COMPLETIONS, TOKENS, TOKENS_AFTER_PROOF, Canary, sync_tolerance
from rllm_verl.engine import VerlEngine
from rllm_verl.servers import OneServer
from verl_runs import run_config

from rllm_core.config import RunConfig
from rllm_core.errors import RunError
from rllm_core.parser import BaseParser
from rllm_core.types import Floats, TrainingSample

VERSION = 7
Error = Callable[[Floats], Floats]


def logprobs(ids: Sequence[int]) -> Floats:
    """``(tokens,)`` log-probabilities that the trainer gives to sampled tokens."""
    return -1.0 - (np.array(ids, np.float32) % 5)


def exact(correct: Floats) -> Floats:
    return correct


def rounded(correct: Floats) -> Floats:
    """As bfloat16 rounds."""
    return correct + np.float32(0.02) * np.where(np.arange(len(correct)) % 2, 1, -1).astype(np.float32)


def stale(correct: Floats) -> Floats:
    return correct + np.float32(0.5)


def other_experts(correct: Floats) -> Floats:
    """Another expert for two of 16 tokens, which moves each by 1.5 nats: 0.19 on average."""
    changed = correct.copy()
    changed[3:5] -= 1.5
    return changed


class Server:
    """A server's ``generate``, with the interface of verl's Ray actor.

    Args:
        number: Number of the server, so that servers sample different tokens.
        errors: Error of each check; the last one stays.
    """

    def __init__(self, number: int, *errors: Error, version: int = VERSION) -> None:
        self.random = np.random.default_rng(number)
        self.errors = errors
        self.version = version
        self.requests: list[dict[str, Any]] = []
        self.generate = SimpleNamespace(remote=self._generate)

    @property
    def checks(self) -> int:
        """Number of checks that the server was part of."""
        return len(self.requests) // COMPLETIONS

    async def _generate(self, *, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        error = self.errors[min(self.checks, len(self.errors) - 1)]
        self.requests.append(sampling_params | {"id": request_id, "prompt": prompt_ids})
        ids = self.random.integers(5, 100, sampling_params["max_tokens"]).tolist()
        return SimpleNamespace(
            token_ids=ids,
            log_probs=error(logprobs(ids)).tolist(),
            stop_reason="completed",
            extra_fields={"global_steps": self.version},
        )


@pytest.fixture(scope="module")
def parser(model: Path) -> BaseParser:
    return ChatTemplateParser.from_model(model)


@pytest.fixture(scope="module")
def config(model: Path) -> RunConfig:
    return run_config(model, "verl.dtype=bfloat16", "verl.sync_tolerance=0.1", "rollout.max_response_tokens=4")


def check(
    servers: Sequence[Server],
    parser: BaseParser,
    config: RunConfig,
    trainer: Callable[[Sequence[int]], Floats] = logprobs,
    tokens: int = TOKENS,
) -> dict[str, float]:
    """Checks the servers once."""
    engines = {
        f"server {number}": VerlEngine(
            OneServer(server), parser, vocabulary_size=1000, max_model_tokens=256, sends_seeds=True
        )
        for number, server in enumerate(servers)
    }

    async def compute(samples: Sequence[TrainingSample]) -> list[Floats]:
        return [trainer(sample.token_ids[sample.loss_mask].tolist()) for sample in samples]

    return asyncio.run(Canary(engines, config, compute).check(VERSION, tokens))


@pytest.mark.parametrize(("tokens", "total"), [(TOKENS, 128), (TOKENS_AFTER_PROOF, 32)])
def test_every_server_is_asked_for_enough_tokens(
    tokens: int, total: int, parser: BaseParser, config: RunConfig
) -> None:
    servers = [Server(number, rounded) for number in range(8)]
    metrics = check(servers, parser, config, tokens=tokens)
    assert metrics == {
        "sync_logprob_difference": pytest.approx(0.02, abs=1e-5),
        "sync_logprob_difference_max": pytest.approx(0.02, abs=1e-5),
    }
    for server in servers:
        assert server.checks == 1
        assert sum(request["max_tokens"] for request in server.requests) == total
        assert len({request["id"] for request in server.requests}) == COMPLETIONS
        assert len({request["seed"] for request in server.requests}) == COMPLETIONS
        assert all(request["ignore_eos"] and not request["stop_token_ids"] for request in server.requests)


def test_one_stale_server_of_eight_ends_the_run_and_is_named(parser: BaseParser, config: RunConfig) -> None:
    servers = [Server(number, stale if number == 5 else rounded) for number in range(8)]
    with pytest.raises(RunError, match=r"version 7: .*128 tokens by 0.5 .*2 times, at server 5 of 8 servers.* = 0.1:"):
        check(servers, parser, config)
    assert [server.checks for server in servers] == [1] * 5 + [2] + [1] * 2


def test_a_stale_server_is_found_with_few_tokens_too(parser: BaseParser, config: RunConfig) -> None:
    servers = [Server(0, rounded), Server(1, stale)]
    with pytest.raises(RunError, match=r"of 32 tokens by 0.5 .*2 times, at server 1 of 2 servers"):
        check(servers, parser, config, tokens=TOKENS_AFTER_PROOF)


def test_a_server_that_differs_only_once_is_good(parser: BaseParser, config: RunConfig) -> None:
    servers = [Server(0, exact), Server(1, stale, exact)]
    assert check(servers, parser, config)["sync_logprob_difference"] == pytest.approx(0.5)
    assert [server.checks for server in servers] == [1, 2]


def test_other_experts_for_some_tokens_are_no_reason_to_end_a_run(parser: BaseParser, config: RunConfig) -> None:
    server = Server(0, other_experts)
    metrics = check([server], parser, config)
    assert metrics["sync_logprob_difference"] < 0.01
    assert metrics["sync_logprob_difference_max"] == pytest.approx(1.5)
    assert server.checks == 1
    plain_mean = float(np.abs(other_experts(np.zeros(TOKENS, np.float32))).mean())
    assert plain_mean > 0.1, "a plain mean would have ended the run"


def test_no_number_is_no_agreement(parser: BaseParser, config: RunConfig) -> None:
    def one_nan(ids: Sequence[int]) -> Floats:
        return np.where(np.arange(len(ids)) == 0, np.float32(np.nan), logprobs(ids))

    with pytest.raises(RunError, match="disagree on the log-probabilities of 128 tokens by nan"):
        check([Server(0, exact)], parser, config, one_nan)


def test_a_server_with_another_version_is_named(parser: BaseParser, config: RunConfig) -> None:
    with pytest.raises(RunError, match="after weight sync to version 7, server 1 still uses version 6"):
        check([Server(0, exact), Server(1, exact, version=6)], parser, config)


@pytest.mark.parametrize(
    ("described", "dtype", "tolerance"),
    [
        ({"model_type": "qwen3"}, "float32", 0.01),
        ({"model_type": "qwen3"}, "bfloat16", 0.1),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "bfloat16", 0.2),
        ({"model_type": "mixtral", "num_local_experts": 8}, "float32", 0.02),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, "bfloat16", 0.2),
        ({"vision_config": {}, "text_config": {"num_experts": 64}}, "bfloat16", 0.2),
        ({"model_type": "llama", "num_experts": None}, "bfloat16", 0.1),
        (None, "bfloat16", 0.2),  # not on this machine: it may have experts
    ],
)
def test_the_tolerance_follows_precision_and_experts(
    described: dict[str, Any] | None, dtype: str, tolerance: float, config: RunConfig, tmp_path: Path
) -> None:
    if described is not None:
        (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    section = config.plugins["verl"].model_copy(update={"dtype": dtype, "sync_tolerance": None})
    where = str(tmp_path) if described is not None else "someone/not-downloaded"
    changed = config.model_copy(
        update={"plugins": {"verl": section}, "model": config.model.model_copy(update={"path": where})}
    )
    assert sync_tolerance(changed) == tolerance
    assert sync_tolerance(config) == 0.1
