"""``placeholder``: metrics as one CSV file below the run folder."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, TextIO

from pydantic import Field
from rllm_core.config import RunConfig, Section
from rllm_core.training.trackers import Status, Tracker

FILE = Path("trackers", "placeholder", "metrics.csv")


class PlaceholderConfig(Section):
    """``[placeholder]``: its section of the run file."""

    metrics: Annotated[tuple[str, ...], Field(description="Names of the metrics to write; empty is all.")] = ()


class PlaceholderTracker(Tracker):
    """One line ``step,metric,value`` per number.

    A run that goes on from a checkpoint appends; of a step that was trained twice, the last lines count.
    """

    name: ClassVar[str] = "placeholder"

    def __init__(self, config: PlaceholderConfig | None = None) -> None:
        super().__init__(config)
        self._metrics = (config or PlaceholderConfig()).metrics
        self._file: TextIO | None = None

    def start(self, config: RunConfig, run_dir: str) -> None:
        """Open the file, and begin it with the names of its columns if it is new."""
        path = Path(run_dir) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", newline="")
        if self._file.tell() == 0:
            csv.writer(self._file).writerow(["step", "metric", "value"])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step or, with names that begin with ``validation/``, of a validation."""
        assert self._file is not None, "start() comes before log()"
        chosen = [name for name in metrics if not self._metrics or name in self._metrics]
        csv.writer(self._file).writerows([step, name, metrics[name]] for name in chosen)
        self._file.flush()  # it can be followed while the run goes on

    def finish(self, status: Status) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
