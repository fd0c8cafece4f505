"""Trackers: metrics sent to other people's libraries, without ever letting one of them stop or delay training.

Every tracker has a daemon thread of its own that makes its calls one after another; training only puts them into that
thread's queue. A tracker that raises, takes too long for a call or falls too far behind is switched off for the rest
of the run, which is said once and stands in ``summary.json``.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from rllm_core import providers
from rllm_core.blame import blamed, located
from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError, PluginError, UserError
from rllm_core.plugins import PluginManager

logger = logging.getLogger(__name__)

DEADLINE_SECONDS = 60.0
MAX_WAITING_CALLS = 4096
SETTLE_SECONDS = 0.005

Status = Literal["completed", "interrupted", "failed"]
_Call = Callable[["Tracker"], None]


class Tracker(ABC):
    """Sends metrics somewhere.

    It is constructed before anything is allocated, so a library that is missing or a setting that cannot be honoured
    is an error there (`rllm_core.errors.PluginError`, `rllm_core.errors.ConfigError`), and constructing one has no
    effect outside. The calls then come in order, all from one thread that is not the main one: `start`, any number of
    `log`, `finish`. One that raises, or takes longer than a minute, is the last; it never stops training. Runs in one
    process must not mix: a tracker whose library has one run at a time lets the `start` of a second one fail.

    Args:
        config: The section of its provider's ``config``, None if it has none.

    Attributes:
        name: The name it is selected by.
    """

    name: ClassVar[str]

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @abstractmethod
    def start(self, config: RunConfig, run_dir: str) -> None:
        """A run begins or is resumed.

        A resumed run has the same ``run_dir``. A tracker that has to find its remote run again keeps its id in
        ``trackers/NAME.json`` there, and its local files in ``trackers/NAME/``.

        Args:
            config: The run file. `RunConfig.to_tables` has it as nested tables, every `pydantic.SecretStr` masked.
            run_dir: The run folder.
        """

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of an optimizer step, or of a validation (names then begin with ``validation/``).

        Steps do not go down, except that a resumed run repeats those after the checkpoint it goes on from. One step
        may have both kinds.

        Args:
            step: Optimizer steps done.
            metrics: Finite numbers by name; a name may hold ``/``.
        """

    @abstractmethod
    def finish(self, status: Status) -> None:
        """The run has ended; everything logged must be on its way when this returns."""


def construct(config: RunConfig, plugins: PluginManager) -> dict[str, Tracker]:
    """The trackers that a run file names, by those names.

    Raises:
        ConfigError: If one is named twice, or refuses its settings.
        PluginError: If one cannot be imported or constructed.
    """
    chosen: dict[str, Tracker] = {}
    for name in config.training.trackers:
        if name in chosen:
            raise ConfigError(f"training.trackers names {name!r} twice; leave one out")
        provided = plugins.select(providers.Tracker, name)
        tracker_class: type[Tracker] = plugins.load(provided)
        try:
            chosen[name] = tracker_class(config.plugins.get(name))
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a SystemExit of a library is its failure, not the wish to end
            what = located(error, provided.plugin.package)
            raise PluginError(
                f"tracker {name!r} ({provided.plugin.label}) cannot be set up: {what}; "
                "fix it, or remove it from training.trackers"
            ) from error
    return chosen


class Trackers:
    """The trackers of a run, each isolated from the others and from training. Used from one event loop.

    Args:
        trackers: By the names they are reported under.
        note: Who is told, once, of a tracker that is switched off.
        deadline_seconds: How long one call may take, and all that is left to do at the end.
        max_waiting_calls: How far a tracker may fall behind.
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
        """Why trackers were switched off, by name."""
        return {worker.tracker_name: worker.failure for worker in self._workers if worker.failure is not None}

    @property
    def hung(self) -> list[str]:
        """Names of trackers that are still in a call they were given up in."""
        return [worker.tracker_name for worker in self._workers if worker.failure is not None and worker.is_alive()]

    def start(self, config: RunConfig, run_dir: str) -> None:
        """See `Tracker.start`; waits for none of them."""
        for worker in self._workers:
            worker.start()
        self._each(lambda tracker: tracker.start(copy.deepcopy(config), run_dir))  # none of them can change the run's

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`; waits for none of them."""
        logged = dict(metrics)  # as it is now; the calls come later
        self._each(lambda tracker: tracker.log(step, dict(logged)))

    async def finish(self, status: Status) -> None:
        """See `Tracker.finish`; waits until all have done so, have failed, or `deadline_seconds` are over."""
        self._each(lambda tracker: tracker.finish(status))
        end = time.monotonic() + self.deadline_seconds
        for worker in self._workers:
            worker.close()
        # Polled: whoever waits for a thread in another thread leaves that one behind when the first one hangs.
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
    """Makes the calls of one tracker. A daemon: a tracker that hangs must not keep the process from ending.

    Attributes:
        failure: Why the tracker is switched off.
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
        """How long the call that is being made has taken so far."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def put(self, call: _Call) -> None:
        """Have ``call`` made after those before it."""
        if self.failure is not None:
            return
        if self._calls.qsize() >= self._max_waiting_calls:
            self.switch_off(f"it is {self._max_waiting_calls} calls behind")
        else:
            self._calls.put(call)

    def close(self) -> None:
        """Nothing comes any more."""
        self._calls.put(None)

    def switch_off(self, failure: str) -> None:
        """Make no further call; the first failure is the one that counts."""
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
            except BaseException as error:  # in a thread: a real Ctrl-C arrives elsewhere
                self.switch_off(blamed(error))
            finally:
                self._began = None
