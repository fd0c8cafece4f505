"""Requests, routing and sleep, without servers: verl's router and client calls, and the backend's part in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rllm_renderers.chat_template import ChatTemplateParser
from rllm_verl import verl_api
from rllm_verl.backend import VerlBackend
from rllm_verl.reporting import ReportingManager
from rllm_verl.servers import Servers
from verl.workers.rollout.router import GlobalRequestLoadBalancer
from verl_runs import ASYNCHRONOUS, run_config

from rllm_core.plugins import PluginManager
from rllm_core.types import SamplingParams, TokenIds, token_ids

SERVERS = 8


class Client:
    """verl's client with its real router; a completion is the seed and the number of the request."""

    def __init__(self) -> None:
        self.router = GlobalRequestLoadBalancer({f"server {number}": None for number in range(SERVERS)})
        self.settings: list[dict[str, Any]] = []
        self.servers: list[str] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        server, _ = self.router.acquire_server(request_id)
        self.servers.append(server)
        self.settings.append(sampling_params)
        await asyncio.sleep(0)
        self.router.release_server(server)
        ids = [5 + len(self.settings), *[6] * (sampling_params["max_tokens"] - 1)]
        versions = {"min_global_steps": 0, "max_global_steps": 0}
        return SimpleNamespace(
            token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason="completed", extra_fields=versions
        )


class Cluster:
    """Runs the calls of verl's blocking API."""

    def __init__(self, backend: VerlBackend) -> None:
        self.config = backend.config
        self.settings = backend.verl

    async def call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class Weights:
    """verl's manager of weight syncs: records what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def update_weights(self, version: int) -> None:
        self.calls.append(f"sync {version}")

    def sleep_replicas(self) -> None:
        self.calls.append("sleep")


def backend_with_servers(model: Path, *overrides: str) -> tuple[VerlBackend, Client, Weights]:
    """A backend whose servers have a client and weights of this file."""
    plugins = PluginManager.from_environment()
    backend = VerlBackend(run_config(model, *overrides), plugins)
    client, weights = Client(), Weights()
    servers = Servers(Cluster(backend), backend._configuration, trainers=None)  # type: ignore[arg-type]
    servers._manager = SimpleNamespace(get_client=lambda client_cls: client)
    servers._weights = weights
    backend._servers = servers
    backend._engine = servers.engine(ChatTemplateParser.from_model(model), 256)
    return backend, client, weights


GPU = ("verl.device=cuda", "verl.dtype=bfloat16", "verl.attention=flash_attention_2")


@pytest.mark.parametrize(
    ("overrides", "sends"),
    [
        ((), True),
        (GPU, False),
        ((*ASYNCHRONOUS, "training.partial_rollout=true"), False),
        ((*ASYNCHRONOUS, "training.partial_rollout=false"), True),
    ],
)
def test_requests_have_seeds_only_where_they_help(model: Path, overrides: tuple[str, ...], sends: bool) -> None:
    backend, client, _ = backend_with_servers(model, *overrides)
    engine = backend._engine
    assert engine is not None
    params = SamplingParams(max_response_tokens=4)
    asyncio.run(engine.get_token_outputs_from_token_input([5, 6], sampling_params=params, seeds=[3, 2**40]))
    assert ["seed" in settings for settings in client.settings] == [sends] * 2
    if sends:
        assert [settings["seed"] for settings in client.settings] == [3, 2**40 % (2**31 - 1)]


def test_the_turns_of_a_rollout_meet_on_one_server_and_rollouts_spread(model: Path) -> None:
    backend, client, _ = backend_with_servers(model)
    engine = backend._engine
    assert engine is not None
    params = SamplingParams(max_response_tokens=20)
    task: TokenIds = token_ids(np.arange(40))

    async def rollout() -> set[str]:
        """Plays four turns; returns the servers that took part."""
        used, written = set(), task
        for turn in range(4):
            before = len(client.servers)
            output = await engine.get_token_output_from_token_input(written, sampling_params=params, seed=turn)
            used |= set(client.servers[before : before + 1])
            written = token_ids(np.concatenate([written, output.token_ids, [turn, 9, 9]]))
        return used

    async def all_in_turn() -> list[set[str]]:
        return [await rollout() for _ in range(32)]

    found = asyncio.run(all_in_turn())
    assert all(len(used) == 1 for used in found)
    assert len(set.union(*found)) > 1  # the router draws among idle servers


@pytest.mark.parametrize("client", ["LLMServerClient", "FullyAsyncLLMServerClient"])
def test_verls_client_asks_the_router_in_this_process(model: Path, client: str) -> None:
    """Also where its requests end, so that idle servers come first."""
    config = VerlBackend(run_config(model), PluginManager.from_environment())._configuration
    manager = ReportingManager(config, worker_group=SimpleNamespace(world_size=2))
    asked: list[str] = []

    def server(name: str) -> SimpleNamespace:
        async def generate(prompt_ids: list[int], **options: Any) -> SimpleNamespace:
            asked.append(name)
            await asyncio.sleep(0)
            if not prompt_ids:
                raise ValueError("no prompt")
            return SimpleNamespace(
                token_ids=[1], log_probs=[-1.0], routed_experts=None, num_preempted=0, stop_reason="length",
                extra_fields={"global_steps": 3},
            )  # fmt: skip

        return SimpleNamespace(generate=SimpleNamespace(remote=generate))

    manager.server_addresses, manager.server_handles = ["one", "two"], [server("one"), server("two")]

    async def ask() -> None:
        await manager._init_global_load_balancer()
        found = manager.get_client(client_cls=verl_api.use(client))
        requests = [("a", [5]), ("b", []), ("c", [5]), ("d", [5])]
        options = {"sampling_params": {"max_tokens": 1}}
        answers = await asyncio.gather(
            *(found.generate(request_id=name, prompt_ids=ids, **options) for name, ids in requests),
            return_exceptions=True,
        )
        assert [type(answer) for answer in answers].count(ValueError) == 1
        assert sorted(asked) == ["one", "one", "two", "two"]
        assert await manager.global_load_balancer.get_total_inflight.remote() == 0
        again = [await found.generate(request_id=name, prompt_ids=[5], **options) for name, _ in requests]
        assert asked[4:] == asked[:4]
        assert {answer.extra_fields["min_global_steps"] for answer in again} == {3}

    asyncio.run(ask())


def test_servers_are_awake_after_a_supervised_validation(model: Path) -> None:
    """The trainer's log-probabilities need the devices, but no weight sync follows that would wake the servers."""
    backend, _, weights = backend_with_servers(model, "verl.release_memory=true")
    servers = backend._servers
    assert servers is not None

    async def play() -> None:
        await servers.sleep()
        await backend._synchronize(1)
        backend._version = 1
        await backend.enter_generation()  # awake already
        assert weights.calls == ["sleep", "sync 1"]
        await backend.enter_training()
        assert servers.are_asleep
        await backend.enter_generation()
        assert not servers.are_asleep
        assert weights.calls == ["sleep", "sync 1", "sleep", "sync 1"]
        await backend.enter_training()
        backend._version = None  # an optimizer step: the weights have no version until the sync
        await backend.enter_generation()
        assert servers.are_asleep
        await backend._synchronize(2)
        assert weights.calls[4:] == ["sleep", "sync 2"]

    asyncio.run(play())


def test_servers_that_keep_their_memory_never_sleep(model: Path) -> None:
    backend, _, weights = backend_with_servers(model, "verl.release_memory=false")
    asyncio.run(backend.enter_training())
    asyncio.run(backend.enter_generation())
    assert weights.calls == []
