"""Trackers send the metrics of a run to another library or service."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from rllm_core.config import RunConfig

Status = Literal["completed", "interrupted", "failed"]
Cell = str | float | None


class Tracker(ABC):
    """Sends metrics to a library or service.

    A tracker is constructed before anything is allocated. The constructor raises if a library is missing or a setting
    is not supported (`rllm_core.errors.PluginError`, `rllm_core.errors.ConfigError`), and has no side effects. The
    calls then come in order, all from one thread that is not the main one: `start`, any number of `log` and
    `log_table`, `finish`.
    After a call that raises or takes longer than a minute, the tracker gets no more calls; training continues. Runs in
    one process must not mix: if the library supports only one run at a time, the `start` of a second run must fail.

    Args:
        config: Section validated by its provider's ``config``, or None.

    Attributes:
        name: Name by which run files select the tracker.
    """

    name: ClassVar[str]

    def __init__(self, config: Any = None) -> None:
        self.config = config

    @abstractmethod
    def start(self, config: RunConfig, run_dir: str) -> None:
        """Starts or resumes a run.

        A resumed run has the same ``run_dir``. To find its remote run again, a tracker stores the run's id in
        ``trackers/NAME.json`` there, and its local files in ``trackers/NAME/``.

        Args:
            config: Run file. `RunConfig.to_tables` returns it as nested tables, with every `pydantic.SecretStr` masked.
            run_dir: Run folder.
        """

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs metrics of an optimizer step, or of a validation (whose names start with ``validation/``).

        Steps never decrease, except that a resumed run repeats the steps after its checkpoint and, after a kill, the
        last 100 before it. A step may have both kinds.

        Args:
            step: Optimizer steps done.
            metrics: Finite numbers by name; a name may contain ``/``.
        """

    def log_table(  # noqa: B027 - trackers without tables ignore them
        self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]
    ) -> None:
        """Logs a table, such as the sampled answers of a step; by default does nothing, for trackers without tables.

        Args:
            name: Name of the table, the same at every step.
            step: Optimizer steps done.
            columns: Names of the columns.
            rows: Cells of each row in the order of ``columns``: any text, also of a model and of any length, finite
                numbers, and None.
        """

    @abstractmethod
    def finish(self, status: Status) -> None:
        """Ends the run; everything logged must be sent when this returns."""
