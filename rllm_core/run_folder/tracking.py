"""Sends metrics to the trackers of a run, without letting the trackers stop or delay training.

Every tracker has its own thread, which makes its calls one after another; training only adds calls to its queue.
A tracker that raises, takes too long for a call or falls too far behind is switched off for the rest of the run. The
run reports this once and records it in ``summary.json``.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rllm_core.config import RunConfig
from rllm_core.plugins.blame import blamed
from rllm_core.run_folder import answers_table
from rllm_core.run_folder.groups import RecordedGroup
from rllm_core.run_folder.metrics import WORKFLOW
from rllm_core.run_folder.results import ValidationResult
from rllm_core.third_party_calls import CallThread
from rllm_core.tracker import Cell, Status, Tracker

logger = logging.getLogger(__name__)

DEADLINE_SECONDS = 60.0
MAX_WAITING_CALLS = 4096
SETTLE_SECONDS = 0.005


class Trackers:
    """Trackers of a run, isolated from each other and from training. For use from one event loop.

    Args:
        note: Called once for each tracker that is switched off.
        deadline_seconds: Timeout of one call, and of all remaining calls at the end.

    Attributes:
        failed: Reasons why trackers were switched off, by name.
    """

    def __init__(
        self,
        trackers: Mapping[str, Tracker],
        *,
        note: Callable[[str], None] = logger.error,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self.deadline_seconds = deadline_seconds
        self.failed: dict[str, str] = {}
        self._note = note
        self._noted: set[str] = set()
        self._trackers = dict(trackers)
        self._workers = {name: CallThread(f"tracker-{name}") for name in trackers}

    @property
    def hung(self) -> list[str]:
        """Names of switched-off trackers whose last call is still running."""
        return [name for name, worker in self._workers.items() if name in self.failed and worker.is_alive()]

    def start(self, config: RunConfig, run_dir: str) -> None:
        """See `Tracker.start`; does not wait."""
        for worker in self._workers.values():
            worker.start()
        # Copies, so that no tracker can change the run's config.
        self._each(lambda tracker: tracker.start(copy.deepcopy(config), run_dir))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`; does not wait."""
        logged = dict(metrics)  # a copy: the calls come later
        self._each(lambda tracker: tracker.log(step, dict(logged)))

    def log_table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """See `Tracker.log_table`; does not wait."""
        logged = [list(row) for row in rows]
        self._each(lambda tracker: tracker.log_table(name, step, list(columns), copy.deepcopy(logged)))

    def log_step(self, metrics: Mapping[str, float], timings: Mapping[str, float | None]) -> None:
        """Logs the lines of an optimizer step."""
        self.log(int(metrics["step"]), {**metrics, **{name: v for name, v in timings.items() if v is not None}})

    def log_validation(self, result: ValidationResult) -> dict[str, float]:
        """Logs a validation; returns its metrics, without the prefix that they have in trackers."""
        fields = result.to_dict()
        fields |= {f"{WORKFLOW}/{name}": value for name, value in fields.pop("metrics").items()}
        metrics = {key: float(value) for key, value in fields.items() if value is not None}
        self.log(result.step, {f"validation/{key}": value for key, value in metrics.items()})
        return metrics

    def log_answers(self, step: int, groups: Sequence[RecordedGroup]) -> None:
        """Logs the table of a step's sampled answers."""
        self.log_table(answers_table.NAME, step, answers_table.COLUMNS, list(answers_table.rows(groups)))

    async def finish(self, status: Status) -> None:
        """See `Tracker.finish`; waits until all trackers have finished or failed, at most `deadline_seconds`."""
        self._each(lambda tracker: tracker.finish(status))
        end = time.monotonic() + self.deadline_seconds
        for worker in self._workers.values():
            worker.close()
        # Poll, because a helper thread joining a hung tracker would hang with it.
        while working := [n for n, worker in self._workers.items() if worker.is_alive() and n not in self.failed]:
            if time.monotonic() >= end:
                for name in working:
                    self._switch_off(
                        name, f"it did not finish within {self.deadline_seconds:g} s after the end of the run"
                    )
            await asyncio.sleep(SETTLE_SECONDS)
        self._report()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, worker in self._workers.items():
            if worker.seconds_in_call > self.deadline_seconds:
                self._switch_off(name, f"a call took longer than {self.deadline_seconds:g} s")
            elif worker.waiting >= MAX_WAITING_CALLS:
                self._switch_off(name, f"it is {MAX_WAITING_CALLS} calls behind")
            if name not in self.failed:
                worker.put(partial(call, self._trackers[name]), partial(self._ended, name))
        self._report()

    def _ended(self, name: str, result: object, error: BaseException | None, seconds: float) -> None:
        if error is not None:
            self._switch_off(name, blamed(error))

    def _switch_off(self, name: str, reason: str) -> None:
        self.failed.setdefault(name, reason)  # from any thread; only the first reason counts
        self._workers[name].close(drops_calls=True)

    def _report(self) -> None:
        for name, reason in self.failed.copy().items():
            if name not in self._noted:
                self._noted.add(name)
                self._note(f"tracker {name!r} is switched off for the rest of the run: {reason}")
