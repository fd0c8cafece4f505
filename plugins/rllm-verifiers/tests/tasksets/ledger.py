"""A taskset with tools and a state: book amounts, and say what is left."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["Ledger"]


class LedgerState(vf.State):
    """What one rollout has booked."""

    total: int = 0


class LedgerTools(vf.Toolset[vf.ToolsetConfig, LedgerState]):
    """A server for every rollout."""

    TOOL_PREFIX = "ledger"

    @vf.tool
    def book(self, amount: int) -> str:
        """Books an amount, and returns the total."""
        self.state.total += amount
        return f"total {self.state.total}"


class LedgerData(vf.TaskData):
    """What is to be booked."""

    total: int


class LedgerTaskConfig(vf.TaskConfig):
    """Where the tools run."""

    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class LedgerTask(vf.Task[LedgerData, LedgerState, LedgerTaskConfig]):
    """Scores the state and the answer."""

    @classmethod
    def toolsets(cls, config: LedgerTaskConfig) -> list[vf.Toolset]:
        """The tools of a rollout."""
        return [LedgerTools(config.tools)]

    @vf.reward(weight=0.5)
    async def booked(self, trace: vf.Trace) -> float:
        """Whether the right total is booked."""
        return float(trace.state.total == self.data.total)

    @vf.reward(weight=0.5)
    async def said(self, trace: vf.Trace) -> float:
        """Whether the answer is the total."""
        return float(trace.last_reply.strip() == f"total {self.data.total}")


class LedgerConfig(vf.TasksetConfig):
    """Settings."""

    task: LedgerTaskConfig = LedgerTaskConfig()


class Ledger(vf.Taskset[LedgerTask, LedgerConfig]):
    """Twelve tasks."""

    def load(self) -> list[LedgerTask]:
        """Returns them."""
        return [
            LedgerTask(
                LedgerData(prompt=f"Book {a} and {a + 1}, then say the total.", total=2 * a + 1), self.config.task
            )
            for a in range(1, 13)
        ]


if __name__ == "__main__":
    LedgerTools.run()
