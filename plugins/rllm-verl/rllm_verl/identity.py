"""Proves after a weight sync that servers have the weights sent, by fingerprints of the tensors they compute with.

This detects what log-probabilities cannot: differences below the noise of bfloat16, and adapters whose product is zero.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from rllm_core.errors import RunError
from rllm_verl.cluster import Cluster
from rllm_verl.lora import Adapter

# Weights compared in one check, in rotation; adapters are all compared in every check.
WEIGHTS = 8
PLACE = ("rows", "columns", "dtype")


class Identity:
    """Compares the tensors that servers use with those that the trainers send.

    Args:
        cluster: Ray cluster of the run.
        servers: Ray handle of each server, by the server's name.
        trainers: Worker group of the trainers.
        adapter: Adapters of the servers, or None.
        deadline_seconds: Timeout of a server's answer.

    Attributes:
        compared_all: Whether the last check compared every tensor that a sync sends.
    """

    def __init__(
        self,
        cluster: Cluster,
        servers: Mapping[str, Any],
        trainers: Any,
        *,
        adapter: Adapter | None,
        deadline_seconds: float,
    ) -> None:
        self._cluster = cluster
        self._servers = dict(servers)
        self._trainers = trainers
        self._adapter = adapter
        self._deadline_seconds = deadline_seconds
        self._names: dict[str, list[str]] | None = None
        self._next = 0
        self.compared_all = False

    async def check(self, version: int) -> dict[str, float]:
        """Checks all servers after a weight sync.

        Returns:
            Metrics.

        Raises:
            RunError: If a server has another version, other adapters, or another value of a tensor.
        """
        names = await self._sample()
        reports = dict(
            zip(self._servers, await asyncio.gather(*(self._asked(each, names) for each in self._servers)), strict=True)
        )
        parts = _parts(reports.values())
        calling = partial(self._trainers.report_sent, parts)
        [sent, *_] = await self._cluster.call("the fingerprints of the trainer's weights", calling)
        ours = {_key(part): fingerprint for part, fingerprint in zip(parts, sent, strict=True)}
        for server, report in reports.items():
            if problem := self._problem(report, version, ours):
                raise RunError(f"weight sync to version {version}: {server} of {len(self._servers)} servers {problem}")
        self.compared_all = self._are_all(names, reports.values())
        return {"sync_tensors_compared": float(len({part["name"] for part in parts}))}

    async def _sample(self) -> list[str]:
        """Returns all adapters, and the next few weights."""
        if self._names is None:
            [self._names, *_] = await self._cluster.call(
                "the names of the trainer's weights", self._trainers.sent_names
            )
        weights = self._names["weights"]
        start, self._next = self._next, (self._next + WEIGHTS) % len(weights)
        return [*self._names["adapters"], *(weights + weights)[start : start + min(WEIGHTS, len(weights))]]

    def _are_all(self, names: list[str], reports: Iterable[dict[str, Any]]) -> bool:
        """Whether all workers of all servers reported every tensor that a sync sends."""
        assert self._names is not None
        sent = set(self._names["weights"] if self._adapter is None else self._names["adapters"])
        workers = [worker for report in reports for worker in report["workers"]]
        return sent <= set(names) and all(worker["tensors"][name] is not None for worker in workers for name in sent)

    async def _asked(self, server: str, names: list[str]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._deadline_seconds):
                answer = asyncio.ensure_future(self._servers[server].report.remote(names))
                report: dict[str, Any] = await self._cluster.watched(f"asking {server} for its weights", answer)
        except TimeoutError:
            raise RunError(f"{server} did not report its weights within {self._deadline_seconds:g} s") from None
        return report

    def _problem(self, report: dict[str, Any], version: int, ours: dict[tuple[Any, ...], dict[str, Any]]) -> str:
        """Returns what is wrong at a server; empty if nothing is."""
        if report["version"] != version:
            return f"has version {report['version']}"
        differing: dict[str, str] = {}
        for worker in report["workers"]:
            if self._adapter is not None and (problem := self._other_adapter(worker["adapter"])):
                return problem
            for name, part in worker["tensors"].items():
                if part is None:
                    continue
                mine = ours[_key({"name": name, **part})]
                if part["checksum"] != mine["checksum"]:
                    differing[name] = f"norm {part['norm']:.6g} there, {mine['norm']:.6g} at the trainer"
        if not differing:
            return ""
        compared = sum(part is not None for part in report["workers"][0]["tensors"].values())
        name, said = next(iter(differing.items()))
        return (
            f"does not serve the trainer's weights: {len(differing)} of {compared} compared tensors differ, such as "
            f"{name} ({said})"
        )

    def _other_adapter(self, served: dict[str, Any] | None) -> str:
        assert self._adapter is not None
        if served is None:
            return "serves no adapters"
        if served["rank"] != self._adapter.rank or served["scaling"] != self._adapter.scaling:
            return (
                f"serves adapters of rank {served['rank']} and scaling {served['scaling']:g}, and the trainer has rank "
                f"{self._adapter.rank} and scaling {self._adapter.scaling:g}"
            )
        return ""


def _parts(reports: Any) -> list[dict[str, Any]]:
    """Returns the places of all reported parts, each once, grouped by tensor."""
    found = {
        _key({"name": name, **part}): {"name": name, **{key: part[key] for key in PLACE}}
        for report in reports
        for worker in report["workers"]
        for name, part in worker["tensors"].items()
        if part is not None
    }
    return sorted(found.values(), key=lambda part: str(part["name"]))


def _key(part: dict[str, Any]) -> tuple[Any, ...]:
    columns = None if part["columns"] is None else tuple(part["columns"])
    return part["name"], tuple(part["rows"]), columns, part["dtype"]
