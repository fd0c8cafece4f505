"""Who may dispatch, when weights may change, and how old a rollout can get."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

Hold = Literal["pause", "memory", "window", "end"]


class SyncCoordinator:
    """Admission and versions, counted in groups.

    Between two weight synchronisations at most ``window_quota`` groups are outstanding or consumed:
    ``(1 + staleness_threshold) * trigger_parameter_sync_step * groups_per_step``. A filtered group gives its place
    back at once, a consumed one at the next synchronisation, when the window restarts with what is outstanding. This
    bounds how far generation leads in the aggregate; where groups are trained in the order of their dispatch, it also
    bounds the age of each: one that is admitted as number p of its window is trained at most ``(p - 1) // (sync_step *
    groups_per_step)``, so at most ``ceil(staleness_threshold)``, synchronisations later. In addition no more groups are
    admitted than the run still needs.

    Waiting is by futures that state changes wake, never by polling.

    Args:
        window_quota: Groups per window.
        groups_needed: Groups the whole run is to consume.
    """

    def __init__(self, *, window_quota: int, groups_needed: int) -> None:
        self.window_quota = window_quota
        self.groups_needed = groups_needed
        self.weight_version = 0
        self.in_flight = 0
        self.buffered = 0
        self.consumed = 0
        self.consumed_in_window = 0
        self.paused = False
        self.throttled = False
        self.progress = 0
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def outstanding(self) -> int:
        """Groups in flight or complete and waiting to be trained."""
        return self.in_flight + self.buffered

    @property
    def hold(self) -> Hold | None:
        """What keeps one more group from being dispatched now: a pause, memory, the window, or the end of the run."""
        if self.outstanding + self.consumed >= self.groups_needed:
            return "end"
        if self.paused:
            return "pause"
        if self.throttled:
            return "memory"
        return "window" if self.outstanding + self.consumed_in_window >= self.window_quota else None

    def may_dispatch(self) -> bool:
        """Whether one more group is admitted now."""
        return self.hold is None

    async def admit(self) -> bool:
        """Wait until a group may be dispatched.

        Returns:
            False when the run needs no more groups.
        """
        await self._until(lambda: self.may_dispatch() or self.consumed >= self.groups_needed)
        return self.consumed < self.groups_needed

    def on_dispatched(self) -> None:
        """A group is on its way.

        Raises:
            RuntimeError: If it was not admitted.
        """
        if not self.may_dispatch():
            raise RuntimeError("a group was dispatched without being admitted")
        self.in_flight += 1
        self._changed()

    def on_completed(self) -> None:
        """A group in flight is complete and waits to be trained."""
        self.in_flight -= 1
        self.buffered += 1
        self._changed()

    def on_dropped(self) -> None:
        """A group in flight was filtered, failed or cancelled: its place is free again."""
        self.in_flight -= 1
        self._changed()

    def on_discarded(self, groups: int) -> None:
        """Complete groups were thrown away untrained."""
        self.buffered -= groups
        self._changed()

    def on_consumed(self, groups: int) -> None:
        """Complete groups have been handed to training."""
        self.buffered -= groups
        self.consumed += groups
        self.consumed_in_window += groups
        self._changed()

    def on_returned(self, groups: int) -> None:
        """Groups that training had taken wait to be trained again: their optimizer step was not finished."""
        self.buffered += groups
        self.consumed -= groups
        self.consumed_in_window -= groups
        self._changed()

    def on_restored(self, groups: int) -> None:
        """Complete groups of a checkpoint wait to be trained."""
        self.buffered += groups
        self._changed()

    def throttle(self, throttled: bool) -> None:
        """Admit nothing while ``throttled``, for lack of memory; a synchronisation's pause is another matter."""
        if throttled != self.throttled:
            self.throttled = throttled
            self._changed()

    def on_synced(self, version: int) -> None:
        """New weights are live; a new window begins with what is outstanding."""
        self.weight_version = version
        self.consumed_in_window = 0
        self._changed()

    def pause(self) -> None:
        """Admit nothing until `resume`."""
        self.paused = True
        self._changed()

    def resume(self) -> None:
        """Admit again."""
        self.paused = False
        self._changed()

    async def drained(self) -> None:
        """Wait until no group is in flight."""
        await self._until(lambda: self.in_flight == 0)

    def touch(self) -> None:
        """Something made progress; for the watchdog."""
        self.progress += 1

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    def _changed(self) -> None:
        self.progress += 1
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def state_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "weight_version": self.weight_version,
            "consumed": self.consumed,
            "consumed_in_window": self.consumed_in_window,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the manifest; nothing is in flight after a restart."""
        self.weight_version = state["weight_version"]
        self.consumed = state["consumed"]
        self.consumed_in_window = state["consumed_in_window"]
