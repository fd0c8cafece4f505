"""Host ``inline``: rollouts run in the event loop of the run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rllm_core.hosts.contract import HostReport, Place, RolloutHost


class Inline(RolloutHost):
    """Runs rollouts in the process of the run."""

    name = "inline"
    runs_elsewhere = False

    async def open(self, *, note: Callable[[str], None], settled: Callable[[], None], folder: Path | None) -> None:
        await self.hosted.workflow.open()

    async def close(self) -> None:
        await self.hosted.workflow.close()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        yield self.hosted.workflow

    def report(self) -> HostReport:
        return HostReport(where="the process of the run")
