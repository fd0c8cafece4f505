"""Which tensors the proof of identity compares, when, and how servers that do not answer well are named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from rllm_verl.canary import TOKENS, TOKENS_AFTER_PROOF
from rllm_verl.identity import WEIGHTS, Identity
from rllm_verl.lora import Adapter
from rllm_verl.proofs import Proofs

from rllm_core.errors import RunError

NAMES = [f"layer{number}.weight" for number in range(2 * WEIGHTS + 3)]
ADAPTERS = ["layer0.lora_A", "layer0.lora_B"]
VERSION = 7
ADAPTER = Adapter(rank=8, alpha=16.0, target_modules=())
PLACE = {"rows": [0, 2], "columns": [0, 3], "dtype": "float32"}


class Trainers:
    """Group of two ranks; the second gathers, and its answers are not used."""

    def sent_names(self) -> list[dict[str, list[str]]]:
        return [{"weights": NAMES, "adapters": ADAPTERS}] * 2

    def report_sent(self, parts: list[dict[str, Any]]) -> list[Any]:
        return [[{"checksum": f"sum of {part['name']}", "norm": 1.0} for part in parts], []]


class Server:
    """A server with two workers that serve what the trainers send, but for ``changes`` to the second one's report."""

    def __init__(self, change: Callable[[dict[str, Any]], Any] = lambda report: None) -> None:
        self.asked: list[list[str]] = []
        self._change = change
        self.report = SimpleNamespace(remote=self._report)

    async def _report(self, names: list[str]) -> dict[str, Any]:
        self.asked.append(names)
        workers = [
            {
                "adapter": {"rank": 8, "scaling": 2.0},
                "tensors": {name: {**PLACE, "checksum": f"sum of {name}", "norm": 1.0} for name in names},
            }
            for _ in range(2)
        ]
        report = {"version": VERSION, "workers": workers}
        await asyncio.sleep(0)
        self._change(report)
        return report


class Cluster:
    async def call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    async def watched(self, what: str, call: asyncio.Future[Any]) -> Any:
        return await call


def identity(
    *servers: Server,
    deadline_seconds: float = 60.0,
    adapter: Adapter | None = ADAPTER,
) -> Identity:
    named = {f"server {number}": server for number, server in enumerate(servers)}
    cluster: Any = Cluster()
    return Identity(cluster, named, Trainers(), adapter=adapter, deadline_seconds=deadline_seconds)


def test_adapters_are_always_compared_and_weights_take_turns() -> None:
    server = Server()
    proof = identity(server)
    for _ in range(3):
        assert asyncio.run(proof.check(VERSION)) == {"sync_tensors_compared": len(ADAPTERS) + WEIGHTS}
    assert all(set(ADAPTERS) < set(names) for names in server.asked)
    assert {name for names in server.asked for name in names} == {*ADAPTERS, *NAMES}


def another_value(report: dict[str, Any]) -> None:
    report["workers"][1]["tensors"]["layer0.lora_B"].update(checksum="other", norm=2.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            another_value,
            r"does not serve the trainer's weights: 1 of 10 compared tensors differ, such as layer0.lora_B "
            r"\(norm 2 there, 1 at the trainer\)",
        ),
        (lambda report: report.update(version=VERSION - 1), "has version 6"),
        (lambda report: report["workers"][1].update(adapter=None), "serves no adapters"),
        (
            lambda report: report["workers"][0].update(adapter={"rank": 4, "scaling": 2.0}),
            "serves adapters of rank 4 and scaling 2, and the trainer has rank 8 and scaling 2",
        ),
    ],
)
def test_the_second_of_three_servers_is_named(change: Callable[[dict[str, Any]], Any], said: str) -> None:
    with pytest.raises(RunError, match=f"weight sync to version 7: server 1 of 3 servers {said}"):
        asyncio.run(identity(Server(), Server(change), Server()).check(VERSION))


def test_a_tensor_that_no_server_can_report_is_not_counted() -> None:
    def hide(report: dict[str, Any]) -> None:
        for worker in report["workers"]:
            worker["tensors"]["layer0.weight"] = None

    found = asyncio.run(identity(Server(hide), Server(hide)).check(VERSION))
    assert found == {"sync_tensors_compared": len(ADAPTERS) + WEIGHTS - 1}


def test_a_server_that_never_reports_is_named() -> None:
    async def never(names: list[str]) -> None:
        await asyncio.Event().wait()

    silent = Server()
    silent.report = SimpleNamespace(remote=never)
    with pytest.raises(RunError, match=r"server 1 did not report its weights within 0\.1 s"):
        asyncio.run(identity(Server(), silent, deadline_seconds=0.1).check(VERSION))


def hide_adapters(report: dict[str, Any]) -> None:
    for name in ADAPTERS:
        report["workers"][1]["tensors"][name] = None


@pytest.mark.parametrize(("change", "expected"), [(lambda report: None, True), (hide_adapters, False)])
def test_all_is_compared_if_every_worker_reports_all_adapters(
    change: Callable[[dict[str, Any]], Any], expected: bool
) -> None:
    proof = identity(Server(), Server(change))
    asyncio.run(proof.check(VERSION))
    assert proof.compared_all is expected


@pytest.mark.parametrize("names", [NAMES, NAMES[:WEIGHTS]])
def test_weights_that_go_round_are_not_all(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainers, "sent_names", lambda self: [{"weights": names, "adapters": []}])
    proof = identity(Server(), adapter=None)
    asyncio.run(proof.check(VERSION))
    assert proof.compared_all is (len(names) == WEIGHTS)


@pytest.mark.parametrize(
    ("every", "numbers_every", "compared_all", "identities", "numbers"),
    [
        (1, None, False, range(20), range(20)),
        (1, None, True, range(20), (0, 1, 8, 16)),
        (1, 3, True, range(20), (0, 1, 3, 6, 9, 12, 15, 18)),
        (1, 3, False, range(20), (0, 1, 3, 6, 9, 12, 15, 18)),
        (3, None, False, range(0, 20, 3), range(0, 20, 3)),
        (3, 4, False, range(0, 20, 3), (0, 3, 12)),
        (100, None, True, (0,), (0,)),
    ],
)
def test_the_first_syncs_are_always_checked_and_then_every_nth(
    every: int, numbers_every: int | None, compared_all: bool, identities: Iterable[int], numbers: Iterable[int]
) -> None:
    seen: dict[str, list[int]] = {"identity": [], "numbers": []}
    asked: list[int] = []

    class Proof:
        def __init__(self, name: str) -> None:
            self.name = name
            self.compared_all = compared_all

        async def check(self, version: int, tokens: int | None = None) -> dict[str, float]:
            seen[self.name].append(version)
            asked.extend([] if tokens is None else [tokens])
            return {self.name: 1.0}

    identity_proof: Any = Proof("identity")
    canary: Any = Proof("numbers")
    proofs = Proofs(identity_proof, canary, every, numbers_every)
    metrics = [asyncio.run(proofs.check(version)) for version in range(20)]
    assert seen == {"identity": list(identities), "numbers": list(numbers)}
    assert asked == [TOKENS_AFTER_PROOF if compared_all and number > 1 else TOKENS for number in range(len(asked))]
    for name, versions in seen.items():
        assert [version for version, found in enumerate(metrics) if name in found] == versions


def test_where_tensors_cannot_be_compared_numbers_always_are() -> None:
    class Numbers:
        async def check(self, version: int, tokens: int) -> dict[str, float]:
            return {"numbers": tokens}

    canary: Any = Numbers()
    proofs = Proofs(None, canary, 1, None)
    assert [asyncio.run(proofs.check(version)) for version in range(20)] == [{"numbers": TOKENS}] * 20
