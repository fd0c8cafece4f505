"""Trackers: send metrics to third-party libraries, without letting them stop or delay training.

Every tracker has its own daemon thread that makes its calls one after another; training only adds them to the thread's
queue. A tracker that raises, takes too long for a call or falls too far behind is switched off for the rest of the run.
The run reports this once and records it in ``summary.json``.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping

from rllm_core.config import RunConfig
from rllm_core.plugins.blame import blamed
from rllm_core.tracker import Status as Status
from rllm_core.tracker import Tracker as Tracker

logger = logging.getLogger(__name__)

DEADLINE_SECONDS = 60.0
MAX_WAITING_CALLS = 4096
SETTLE_SECONDS = 0.005

_Call = Callable[[Tracker], None]


class Trackers:
    """Trackers of a run, isolated from each other and from training. For use from one event loop.

    Args:
        trackers: Trackers by name.
        note: Called once for each tracker that is switched off.
        deadline_seconds: Timeout of one call, and of all remaining calls at the end.
        max_waiting_calls: Maximum calls in a tracker's queue.
    """

    def __init__(
        self,
        trackers: Mapping[str, Tracker],
        *,
        note: Callable[[str], None] = logger.error,
        deadline_seconds: float = DEADLINE_SECONDS,
        max_waiting_calls: int = MAX_WAITING_CALLS,
    ) -> None:
        self.deadline_seconds = deadline_seconds
        self._note = note
        self._noted: set[str] = set()
        self._workers = [_Worker(name, tracker, max_waiting_calls) for name, tracker in trackers.items()]

    @property
    def failed(self) -> dict[str, str]:
        """Reasons why trackers were switched off, by name."""
        return {worker.tracker_name: worker.failure for worker in self._workers if worker.failure is not None}

    @property
    def hung(self) -> list[str]:
        """Names of switched-off trackers whose last call is still running."""
        return [worker.tracker_name for worker in self._workers if worker.failure is not None and worker.is_alive()]

    def start(self, config: RunConfig, run_dir: str) -> None:
        """See `Tracker.start`; does not wait."""
        for worker in self._workers:
            worker.start()
        self._each(
            lambda tracker: tracker.start(copy.deepcopy(config), run_dir)
        )  # copies, so that no tracker can change the run's config

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`; does not wait."""
        logged = dict(metrics)  # a copy: the calls come later
        self._each(lambda tracker: tracker.log(step, dict(logged)))

    async def finish(self, status: Status) -> None:
        """See `Tracker.finish`; waits until all trackers have finished or failed, at most `deadline_seconds`."""
        self._each(lambda tracker: tracker.finish(status))
        end = time.monotonic() + self.deadline_seconds
        for worker in self._workers:
            worker.close()
        # Poll, because a helper thread joining a hung tracker would hang with it.
        while any(worker.is_alive() and worker.failure is None for worker in self._workers):
            if time.monotonic() >= end:
                for worker in self._workers:
                    if worker.is_alive():
                        worker.switch_off(
                            f"it did not finish within {self.deadline_seconds:g} s after the end of the run"
                        )
            await asyncio.sleep(SETTLE_SECONDS)
        self._tell()

    def _each(self, call: _Call) -> None:
        for worker in self._workers:
            if worker.seconds_in_call > self.deadline_seconds:
                worker.switch_off(f"a call took longer than {self.deadline_seconds:g} s")
            worker.put(call)
        self._tell()

    def _tell(self) -> None:
        for name, failure in self.failed.items():
            if name not in self._noted:
                self._noted.add(name)
                self._note(f"tracker {name!r} is switched off for the rest of the run: {failure}")


class _Worker(threading.Thread):
    """Thread that makes the calls of one tracker; a daemon, so that a hung tracker does not block the exit.

    Attributes:
        failure: Reason why the tracker is switched off, or None.
    """

    def __init__(self, name: str, tracker: Tracker, max_waiting_calls: int) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)
        self.tracker_name = name
        self.failure: str | None = None
        self._tracker = tracker
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._max_waiting_calls = max_waiting_calls
        self._began: float | None = None
        self._context = contextvars.copy_context()

    @property
    def seconds_in_call(self) -> float:
        """Seconds that the current call has taken so far."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def put(self, call: _Call) -> None:
        """Queues a call."""
        if self.failure is not None:
            return
        if self._calls.qsize() >= self._max_waiting_calls:
            self.switch_off(f"it is {self._max_waiting_calls} calls behind")
        else:
            self._calls.put(call)

    def close(self) -> None:
        """Ends the queue: no more calls follow."""
        self._calls.put(None)

    def switch_off(self, failure: str) -> None:
        """Stops making calls; only the first failure counts."""
        if self.failure is None:
            self.failure = failure
            self.close()

    def run(self) -> None:
        """See `threading.Thread`."""
        self._context.run(self._work)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None and self.failure is None:
            self._began = time.monotonic()
            try:
                call(self._tracker)
            except BaseException as error:  # a real Ctrl-C arrives in the main thread
                self.switch_off(blamed(error))
            finally:
                self._began = None
