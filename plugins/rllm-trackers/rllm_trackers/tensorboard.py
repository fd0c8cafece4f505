"""TensorBoard: event files in the run folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rllm_core.config import RunConfig, Section
from rllm_core.tracker import Cell, Status, Tracker
from rllm_trackers.identity import files_of
from rllm_trackers.library import library
from rllm_trackers.tables import flat, markdown


class TensorboardConfig(Section):
    """``[tensorboard]``: TensorBoard tracker."""

    folder: Annotated[
        str, Field(description="Folder for event files. Defaults to trackers/tensorboard/ in the run folder.")
    ] = ""


class TensorboardTracker(Tracker):
    """Writes scalars, and the run file as hyperparameters.

    A resumed run starts with a marker that makes TensorBoard discard values logged earlier from that step on.
    """

    name: ClassVar[str] = "tensorboard"
    config: TensorboardConfig

    def __init__(self, config: TensorboardConfig) -> None:
        super().__init__(config)
        self._files: Any = library("tensorboard.summary.writer.event_file_writer", tracker=self.name)
        self._events: Any = library("tensorboard.compat.proto.event_pb2", tracker=self.name)
        self._summaries: Any = library("tensorboard.compat.proto.summary_pb2", tracker=self.name)
        self._text: Any = library("tensorboard.plugins.text.summary_v2", tracker=self.name)
        self._hparams: Any = library("tensorboard.plugins.hparams.summary_v2", tracker=self.name)

    def start(self, config: RunConfig, run_dir: str) -> None:
        """See `Tracker.start`."""
        folder = self.config.folder or str(files_of(run_dir) / self.name)
        self._writer = self._files.EventFileWriter(folder)
        self._last_step = 0
        self._is_marked = False
        self._write(0, self._hparams.hparams_pb(flat(config.to_tables()), trial_id=run_dir))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._mark(step)
        # Same form as PyTorch writes, which every reader of event files supports.
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step, self._summaries.Summary(value=values))
        self._last_step = step
        self._writer.flush()

    def log_table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """See `Tracker.log_table`; TensorBoard shows the table as text."""
        self._mark(step)
        self._write(step, self._text.text_pb(name, markdown(columns, rows)))
        self._writer.flush()

    def finish(self, status: Status) -> None:
        """See `Tracker.finish`."""
        self._write(self._last_step, self._text.text_pb("status", status))
        self._writer.close()

    def _mark(self, step: int) -> None:
        if not self._is_marked:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, session_log=start))
            self._is_marked = True

    def _write(self, step: int, summary: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
