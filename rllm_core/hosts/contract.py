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
        traceback: Traceback in the other process, or "".
        is_final: Whether a retry would fail in the same way.
    """

    def __init__(self, reason: TerminationReason, message: str, *, traceback: str = "", is_final: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.traceback = traceback
        self.is_final = is_final


@dataclass(frozen=True, kw_only=True)
class HostedWorkflow:
    """A workflow, and what another process needs to construct it again.

    Attributes:
        workflow: The workflow in the process of the run. Only host ``inline`` opens it.
        load: Dotted path of its class, see `rllm_core.providers.Provider`.
        section: Its section of the run file, as JSON tables.
        sandbox: Value of ``rollout.sandbox``.
    """

    workflow: Workflow
    load: str
    section: dict[str, Any] = field(default_factory=dict)
    sandbox: str = "child"


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """What the user is told about a host.

    Attributes:
        where: Where rollouts run, such as ``2 processes``.
        restarts: Workers that were replaced because they were lost.
        lost_rollouts: Rollout attempts that were lost with a worker.
    """

    where: str
    restarts: int = 0
    lost_rollouts: int = 0


class Place(Protocol):
    """A place for one rollout."""

    async def run(self, task: Task, completer: Completer) -> object:
        """Runs the rollout; see `rllm_core.workflow.Workflow.run`.

        If it is cancelled, the rollout is, too. If the rollout does not end then, the place sets
        ``completer.scope.waits_at``.

        Raises:
            RolloutFailed: If it failed in another process.
        """
        ...


class RolloutHost(ABC):
    """Runs the rollouts of one workflow.

    Args:
        hosted: The workflow.
        config: Section ``[rollout]`` of the run file.
        section: The host's own section, if its record has a model for one.

    Attributes:
        name: Name by which ``rollout.host`` selects it.
        runs_elsewhere: Whether rollouts run outside of the process of the run, so that they may block or change the
            state of their process.
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
        """Whether every rollout that runs here waits for the model, or for something outside of this host.

        While it is False, a rollout may be about to call the model, so a deterministic engine waits with its batch.
        """
        return True

    @property
    def outside(self) -> int:
        """Calls to tools and reward functions that rollouts have in progress in workers."""
        return 0

    @abstractmethod
    async def open(self, *, note: Callable[[str], None], settled: Callable[[], None], folder: Path | None) -> None:
        """Opens the workflow. Called before the first rollout, in its event loop.

        Args:
            note: Called with lines for the user.
            settled: To be called when `is_settled` becomes True.
            folder: Folder for the output of workers, created on demand; None if nothing is kept.

        Raises:
            UserError: If the workflow cannot be opened here.
        """

    @abstractmethod
    async def close(self) -> None:
        """Closes the workflow. Called after the last rollout, and also if `open` failed."""

    @abstractmethod
    def place(self) -> AbstractAsyncContextManager[Place]:
        """Waits for a free place and holds it during the context. The wait does not count as time of the rollout.

        Raises:
            UserError: If there will never be one, because no worker stays alive.
        """

    @abstractmethod
    def report(self) -> HostReport:
        """Returns what the user is told."""
