"""New weights: when they may reach the engine, and who hears of their version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from rllm_core.backend import BackendProtocol, PolicyUpdate
from rllm_core.config import RunConfig
from rllm_core.engine import RolloutEngine
from rllm_core.errors import RunError
from rllm_core.observers import Observers
from rllm_core.training.coordinator import SyncCoordinator
from rllm_core.training.deadlines import within
from rllm_core.training.pace import Pace
from rllm_core.training.reporting import Reporter
from rllm_core.training.saving import Position
from rllm_core.training.state import TrainerState


class Weights:
    """Brings the weights of the trainer to the engine, and their version to everybody.

    Args:
        config: The resolved run file.
        backend: Pushes them.
        engine: Must have the version afterwards.
        colocated: Whether rollouts go on only after `BackendProtocol.enter_generation`.
        coordinator: Holds rollouts back meanwhile.
        reporter: Writes the event.
        observers: Hear of each version.
        pace: Counts the seconds.
        state: Snapshot for hooks.
        idle: Waits until the engine works for no rollout that has ended.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        backend: BackendProtocol[Any],
        engine: RolloutEngine,
        colocated: bool,
        coordinator: SyncCoordinator,
        reporter: Reporter,
        observers: Observers,
        pace: Pace,
        state: Callable[[], TrainerState],
        idle: Callable[[], Awaitable[None]],
    ) -> None:
        self.config = config
        self.backend = backend
        self.engine = engine
        self.colocated = colocated
        self.coordinator = coordinator
        self.reporter = reporter
        self.observers = observers
        self.pace = pace
        self._state = state
        self._idle = idle

    async def synchronise(self, position: Position) -> None:
        """Publish what a step has made; rollouts in flight end before, unless `partial_rollout` lets them run on."""
        if not self.config.training.partial_rollout:
            self.coordinator.pause()
            await self.drained()
        with self.pace.spending("sync"):
            await self.publish(position, "step")
        self.coordinator.resume()

    async def drained(self) -> None:
        """Wait until no group is in flight, and no request of one that was."""
        with self.pace.spending("drain"):
            await self.coordinator.drained()
            await self._idle()

    async def publish(self, position: Position, reason: Literal["start", "step", "resume"]) -> None:
        """New weights to the engine, then the version to everybody; ``position`` says then that they are live.

        Raises:
            RunError: If the engine does not have the version afterwards.
            StallError: If the backend takes too long.
        """
        training, coordinator = self.config.training, self.coordinator
        is_new = reason == "step" or position.synced_step != position.step
        update = PolicyUpdate(coordinator.weight_version + is_new, position.step, reason)
        backend = f"backend {self.config.backend!r}"
        await within(
            training.sync_timeout_seconds, f"on_policy_updated of {backend}", self.backend.on_policy_updated(update)
        )
        if self.engine.weight_version != update.version:
            raise RunError(
                f"backend {self.backend.name!r} left its engine at weight version {self.engine.weight_version}, "
                f"not {update.version}, after on_policy_updated"
            )
        position.synced_step = position.step
        coordinator.on_synced(update.version)
        if self.colocated:
            await within(
                training.backend_timeout_seconds, f"enter_generation of {backend}", self.backend.enter_generation()
            )
        self.reporter.event("sync", version=update.version, step=position.step, reason=reason)
        await self.observers.notify("on_policy_updated", update=update, state=self._state())
