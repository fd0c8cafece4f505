"""``placeholder``: writes metrics to a CSV file in the run folder."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, TextIO

from pydantic import Field
from rllm_core.config import RunConfig, Section
from rllm_core.tracker import Status, Tracker

FILE = Path("trackers", "placeholder", "metrics.csv")


class PlaceholderConfig(Section):
    """Section ``[placeholder]`` of the run file."""

    metrics: Annotated[tuple[str, ...], Field(description="Names of the metrics to write. Defaults to all.")] = ()


class PlaceholderTracker(Tracker):
    """Writes one line ``step,metric,value`` per number.

    A resumed run appends to the file. If a step was trained twice, its last lines count.
    """

    name: ClassVar[str] = "placeholder"

    def __init__(self, config: PlaceholderConfig | None = None) -> None:
        super().__init__(config)
        self._metrics = (config or PlaceholderConfig()).metrics
        self._file: TextIO | None = None

    def start(self, config: RunConfig, run_dir: str) -> None:
        """Opens the file; writes the column names if it is new."""
        path = Path(run_dir) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", newline="")
        if self._file.tell() == 0:
            csv.writer(self._file).writerow(["step", "metric", "value"])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step or a validation; names of the latter start with ``validation/``."""
        assert self._file is not None, "start() comes before log()"
        chosen = [name for name in metrics if not self._metrics or name in self._metrics]
        csv.writer(self._file).writerows([step, name, metrics[name]] for name in chosen)
        self._file.flush()  # so the file can be read during the run

    def finish(self, status: Status) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
