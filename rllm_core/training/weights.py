"""Weight syncs: bring new weights to the engine and publish their version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from rllm_core.backend import BackendProtocol, PolicyUpdate
from rllm_core.config import RunConfig
from rllm_core.engine import RolloutEngine
from rllm_core.errors import RunError
from rllm_core.events import TrainerState
from rllm_core.limits.timeouts import within
from rllm_core.observers import Observers
from rllm_core.run_folder.reporting import Reporter
from rllm_core.training.coordinator import SyncCoordinator
from rllm_core.training.pace import Pace
from rllm_core.training.saving import Position


class Weights:
    """Brings the trainer's weights to the engine, and publishes their version.

    Args:
        config: Resolved run file.
        backend: Backend that sends the weights.
        engine: Engine that must have the version afterwards.
        colocated: Whether rollouts continue only after `BackendProtocol.enter_generation`.
        coordinator: Coordinator that pauses generation during a sync.
        reporter: Reporter for the event.
        observers: Plugins' event hooks.
        pace: Measures the time.
        state: Returns a snapshot for hooks.
        idle: Waits until the engine has no requests of ended rollouts.
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
        """Syncs the weights of a step, after running rollouts have finished unless `partial_rollout` is set."""
        if not self.config.training.partial_rollout:
            self.coordinator.pause()
            await self.drained()
        with self.pace.spending("sync"):
            await self.publish(position, "step")
        self.coordinator.resume()

    async def drained(self) -> None:
        """Waits until no group is in flight and the engine has no requests of ended rollouts."""
        with self.pace.spending("drain"):
            await self.coordinator.drained()
            await self._idle()

    async def publish(self, position: Position, reason: Literal["start", "step", "resume"]) -> None:
        """Sends weights to the engine, records in ``position`` that they are live, and publishes the version.

        Raises:
            RunError: If the engine does not have the version afterwards.
            StallError: If the backend times out.
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
