"""Coordination of generation and weight syncs, which limits staleness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

Hold = Literal["pause", "memory", "window", "end"]


class SyncCoordinator:
    """Admits groups and tracks weight versions.

    In each sync window, at most ``window_quota`` groups are outstanding or consumed:
    ``(1 + staleness_threshold) * trigger_parameter_sync_step * groups_per_step``. A filtered group stops counting at
    once, a consumed one at the next weight sync, when the window restarts with the outstanding groups. This limits the
    total lead of generation. If groups are trained in the order they were started, it also limits the staleness of
    each: the group admitted as number p of its window is trained at most ``(p - 1) // (sync_step * groups_per_step)``
    weight syncs later, so at most ``ceil(staleness_threshold)``. The coordinator never admits more groups than the run
    needs.

    Waiting uses futures that state changes wake, not polling.

    Args:
        window_quota: Maximum groups per window.
        groups_needed: Groups that the whole run consumes.
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
        """Reason why no group can start now: a pause, memory, the window, or the end of the run; None if one can."""
        if self.outstanding + self.consumed >= self.groups_needed:
            return "end"
        if self.paused:
            return "pause"
        if self.throttled:
            return "memory"
        return "window" if self.outstanding + self.consumed_in_window >= self.window_quota else None

    @property
    def space(self) -> int:
        """Number of groups that the window and the run still admit, without a pause or throttling."""
        ahead = self.window_quota - self.consumed_in_window
        return min(ahead, self.groups_needed - self.consumed) - self.outstanding

    def may_dispatch(self) -> bool:
        """Whether another group can start now."""
        return self.hold is None

    async def admit(self) -> bool:
        """Waits until another group can start; returns False if the run needs no more."""
        await self._until(lambda: self.may_dispatch() or self.consumed >= self.groups_needed)
        return self.consumed < self.groups_needed

    def on_dispatched(self) -> None:
        """Counts a group that was started.

        Raises:
            RuntimeError: If the group was not admitted.
        """
        if not self.may_dispatch():
            raise RuntimeError("a group was dispatched without being admitted")
        self.in_flight += 1
        self._changed()

    def on_completed(self) -> None:
        """Counts a group in flight as complete and waiting to be trained."""
        self.in_flight -= 1
        self.buffered += 1
        self._changed()

    def on_dropped(self) -> None:
        """Counts a group in flight as filtered, failed or cancelled, which frees its space in the window."""
        self.in_flight -= 1
        self._changed()

    def on_discarded(self, groups: int) -> None:
        """Counts complete groups that were discarded untrained."""
        self.buffered -= groups
        self._changed()

    def on_consumed(self, groups: int) -> None:
        """Counts complete groups that training has taken."""
        self.buffered -= groups
        self.consumed += groups
        self.consumed_in_window += groups
        self._changed()

    def on_returned(self, groups: int) -> None:
        """Counts taken groups as waiting again, because their optimizer step was not finished."""
        self.buffered += groups
        self.consumed -= groups
        self.consumed_in_window -= groups
        self._changed()

    def on_restored(self, groups: int) -> None:
        """Counts complete groups of a checkpoint as waiting to be trained."""
        self.buffered += groups
        self._changed()

    def throttle(self, throttled: bool) -> None:
        """Stops or resumes admission for lack of memory, independently of `pause`."""
        if throttled != self.throttled:
            self.throttled = throttled
            self._changed()

    def on_synced(self, version: int) -> None:
        """Records a weight sync; the new window starts with the outstanding groups."""
        self.weight_version = version
        self.consumed_in_window = 0
        self._changed()

    def pause(self) -> None:
        """Stops admission until `resume`."""
        self.paused = True
        self._changed()

    def resume(self) -> None:
        """Resumes admission."""
        self.paused = False
        self._changed()

    async def drained(self) -> None:
        """Waits until no group is in flight."""
        await self._until(lambda: self.in_flight == 0)

    def touch(self) -> None:
        """Reports progress to the watchdog."""
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
        """Returns the state for the manifest."""
        return {
            "weight_version": self.weight_version,
            "consumed": self.consumed,
            "consumed_in_window": self.consumed_in_window,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from the manifest; nothing is in flight after a resume."""
        self.weight_version = state["weight_version"]
        self.consumed = state["consumed"]
        self.consumed_in_window = state["consumed_in_window"]
