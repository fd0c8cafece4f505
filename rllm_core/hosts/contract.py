"""Contract of a rollout host: where the ``run`` of a workflow is executed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rllm_core.config import RolloutConfig
from rllm_core.engine import Completer
from rllm_core.types import Task, TerminationReason
from rllm_core.workflow import Workflow


class RolloutFailed(Exception):
    """A rollout failed in another process, where its exception stays.

    Args:
        reason: Termination reason of the episode.
        message: Error of the episode.
        traceback: Traceback from the other process, or "".
        is_final: Whether a retry would fail in the same way.
    """

    def __init__(self, reason: TerminationReason, message: str, *, traceback: str = "", is_final: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.traceback = traceback
        self.is_final = is_final


@dataclass(frozen=True, kw_only=True)
class HostedWorkflow:
    """A workflow, and the data that another process needs to construct it again.

    Attributes:
        workflow: The workflow in the process of the run. Only host ``inline`` opens it.
        load: Dotted path of the workflow's class, see `rllm_core.providers.Provider`.
        section: The workflow's section of the run file, as JSON tables.
        sandbox: Value of ``rollout.sandbox``.
    """

    workflow: Workflow
    load: str
    section: dict[str, Any] = field(default_factory=dict)
    sandbox: str = "child"


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """Report about a host for the user.

    Attributes:
        where: Where rollouts run, such as ``2 processes``.
        restarts: Workers that were replaced because they were lost.
        lost_rollouts: Rollout attempts that were lost with a worker.
    """

    where: str
    restarts: int = 0
    lost_rollouts: int = 0


class Place(Protocol):
    """A slot for one rollout."""

    async def run(self, task: Task, completer: Completer) -> object:
        """Runs the rollout; see `rllm_core.workflow.Workflow.run`.

        Cancelling this call cancels the rollout, too. If the rollout does not end then, the place sets
        ``completer.scope.waits_at``.

        Raises:
            RolloutFailed: If the rollout failed in another process.
        """
        ...


class RolloutHost(ABC):
    """Runs the rollouts of one workflow.

    Args:
        hosted: The workflow.
        config: Section ``[rollout]`` of the run file.
        section: The host's own section of the run file, if its record has a model for it.

    Attributes:
        name: Name by which ``rollout.host`` selects it.
        runs_elsewhere: Whether rollouts run outside the process of the run, so that they may block their process or
            change its state.
    """

    name: ClassVar[str]
    runs_elsewhere: ClassVar[bool] = True

    def __init__(self, hosted: HostedWorkflow, config: RolloutConfig, section: Any = None) -> None:
        self.hosted = hosted
        self.config = config

    @property
    def capacity(self) -> int | None:
        """Maximum number of concurrent rollouts, or None if only ``rollout.max_concurrent_rollouts`` limits it."""
        return None

    @property
    def is_settled(self) -> bool:
        """Whether every rollout that runs here is waiting for the model, or for something outside this host.

        While False, a rollout may be about to call the model, so a deterministic engine delays its batch.
        """
        return True

    @property
    def outside(self) -> int:
        """Number of calls to tools and reward functions that are in progress in workers."""
        return 0

    @abstractmethod
    async def open(self, *, note: Callable[[str], None], settled: Callable[[], None], folder: Path | None) -> None:
        """Opens the workflow. Called before the first rollout, in the event loop that runs the rollouts.

        Args:
            note: Function that shows a line to the user.
            settled: Function that the host calls when `is_settled` becomes True.
            folder: Folder for the output of workers, created on demand; None if nothing is kept.

        Raises:
            UserError: If the workflow cannot be opened here.
        """

    @abstractmethod
    async def close(self) -> None:
        """Closes the workflow. Called after the last rollout, and also if `open` failed."""

    @abstractmethod
    def place(self) -> AbstractAsyncContextManager[Place]:
        """Waits for a free slot and holds it during the context. The wait does not count as time of the rollout.

        Raises:
            UserError: If there will never be a free slot, because no worker stays alive.
        """

    @abstractmethod
    def report(self) -> HostReport:
        """Returns the host's report for the user."""
