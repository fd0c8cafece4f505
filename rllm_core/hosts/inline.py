"""Host ``inline``: rollouts run in the event loop of the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Self

from rllm_core.config import RolloutConfig
from rllm_core.hosts.contract import HostedWorkflow, HostReport, RolloutHost
from rllm_core.hosts.rollout_failures import coroutine_of
from rllm_core.workflow import Workflow


class Inline(RolloutHost):
    """Runs rollouts in the process of the run."""

    name = "inline"
    runs_elsewhere = False

    @classmethod
    def of(cls, workflow: Workflow) -> Self:
        """Returns a host for a workflow that no run file names."""
        return cls(HostedWorkflow(workflow=workflow, load=""), RolloutConfig())

    async def open(self, *, note: Callable[[str], None], settled: Callable[[], None], folder: Path | None) -> None:
        """Opens the workflow."""
        await coroutine_of(self.hosted.workflow.open)

    async def close(self) -> None:
        """Closes the workflow."""
        await coroutine_of(self.hosted.workflow.close)

    def place(self) -> nullcontext[Workflow]:
        """Returns a slot without waiting: ``rollout.max_concurrent_rollouts`` is the only limit."""
        return nullcontext(self.hosted.workflow)

    def report(self) -> HostReport:
        """Reports that rollouts run in this process."""
        return HostReport(where="the process of the run")
