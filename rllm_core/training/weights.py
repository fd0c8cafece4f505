"""Weight syncs: bring new weights to the engine and publish their version."""

from __future__ import annotations

from typing import Literal

from rllm_core.backend import PolicyUpdate
from rllm_core.errors import RunError
from rllm_core.training.run_parts import Position, RunParts


class Weights:
    """Brings the trainer's weights to the engine, and publishes their version."""

    def __init__(self, parts: RunParts) -> None:
        self.parts = parts
        self.coordinator = parts.coordinator
        self.pace = parts.pace

    async def synchronize(self, position: Position) -> None:
        """Syncs the weights of a step, after running rollouts have finished unless `partial_rollout` is set."""
        if not self.parts.config.training.partial_rollout:
            self.coordinator.pause()
            await self.drained()
        with self.pace.spending("sync"):
            await self.publish(position, "step")
        self.coordinator.resume()

    async def drained(self) -> None:
        """Waits until no group is in flight and the engine has no requests of ended rollouts."""
        with self.pace.spending("drain"):
            await self.coordinator.drained()
            await self.parts.runner.idle()

    async def publish(self, position: Position, reason: Literal["start", "step", "resume"]) -> None:
        """Sends weights to the engine, records in ``position`` that they are live, and publishes the version.

        Raises:
            RunError: If the engine does not have the version afterwards.
            StallError: If the backend times out.
        """
        parts, coordinator = self.parts, self.coordinator
        is_new = reason == "step" or position.synced_step != position.step
        update = PolicyUpdate(coordinator.weight_version + is_new, position.step, reason)
        await parts.backend.on_policy_updated(update)
        if parts.engine.weight_version != update.version:
            raise RunError(
                f"backend {parts.backend.name!r} left its engine at weight version {parts.engine.weight_version}, "
                f"not {update.version}, after on_policy_updated"
            )
        position.synced_step = position.step
        coordinator.on_synced(update.version)
        if parts.capabilities.colocated:
            await parts.backend.enter_generation()
        parts.reporter.event("sync", version=update.version, step=position.step, reason=reason)
        await parts.notify("on_policy_updated", update=update)
