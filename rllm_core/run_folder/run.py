"""A run folder for Python programs and notebooks."""

from __future__ import annotations

import html
import tomllib
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm_core.errors import ConfigError, RunError
from rllm_core.run_folder.groups import RecordedGroup
from rllm_core.run_folder.journal import damaged, read_json, read_json_lines
from rllm_core.run_folder.recorded import group_at, index_of
from rllm_core.text import printable
from rllm_core.types import Episode

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Run:
    """The files that a run has written so far; every property reads them again.

        run = Run("runs/sort-20260101-120000")
        run.metrics["reward_mean"]

    Attributes:
        path: Run folder.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        """Opens a run folder for reading.

        Raises:
            ConfigError: If the folder holds no run.
        """
        self.path = Path(path).expanduser()
        if not (self.path / "run.toml").is_file():
            raise ConfigError(f"{self.path} is not a run folder: it has no run.toml")

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def config(self) -> dict[str, Any]:
        """Tables of the resolved run file."""
        path = self.path / "run.toml"
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise damaged(path, error) from error

    @property
    def status(self) -> str:
        """``completed``, ``interrupted`` or ``failed``; ``unfinished`` while the run is active, or if it was killed."""
        return str(self.summary.get("status", "unfinished"))

    @property
    def summary(self) -> dict[str, Any]:
        """Content of ``summary.json``; empty while the run is active, or if it was killed."""
        return summary_of(self.path) or {}

    @property
    def metrics(self) -> Any:
        """Metrics of each step: a pandas DataFrame if pandas is installed, otherwise a list of dictionaries."""
        return _table(read_json_lines(self.path / "metrics.jsonl"))

    @property
    def timings(self) -> Any:
        """Durations of each step, in the form of `metrics`."""
        return _table(read_json_lines(self.path / "timings.jsonl"))

    @property
    def validations(self) -> list[dict[str, Any]]:
        """Results of the validations, starting with the one before step 1."""
        found: list[dict[str, Any]] | None = self.summary.get("validation")
        if found is not None:
            return found
        events = read_json_lines(self.path / "events.jsonl")
        validations = [event for event in events if event["event"] == "validation"]
        return [{key: value for key, value in one.items() if key not in ("event", "episodes")} for one in validations]

    def groups(self, step: int | None = None, *, validation: bool | None = None) -> Iterator[RecordedGroup]:
        """Yields the recorded groups, oldest first. Reads one at a time.

        Args:
            step: Step of the groups; None for all.
            validation: True for groups of validations only, False for groups of training only; None for both.

        Raises:
            RunError: If the files are damaged.
        """
        for entry in index_of(self.path):
            is_chosen = validation is None or validation == (entry.group is None)
            if is_chosen and step in (None, entry.step):
                yield group_at(self.path, entry)

    def episodes(self, step: int | None = None, *, validation: bool | None = None) -> Iterator[Episode]:
        """Yields the episodes of the recorded groups; see `groups`."""
        for group in self.groups(step, validation=validation):
            for rollout in group.rollouts:
                yield rollout.episode

    def plot(self) -> Figure:
        """Draws the reward over the steps, as a figure that a notebook shows.

        Raises:
            RunError: If rllm-viewer or matplotlib is not installed.
        """
        try:
            from rllm_viewer.plot import drawn
        except ModuleNotFoundError:
            raise RunError("a plot needs rllm-viewer: pip install 'rllm-core[plots]'") from None
        figure = drawn(read_json_lines(self.path / "metrics.jsonl"), self.validations, self.path.name)
        if figure is None:
            raise RunError("a plot needs matplotlib: pip install 'rllm-core[plots]'")
        return figure

    def __repr__(self) -> str:
        try:
            outcome = self._outcome()
        except (RunError, OSError, LookupError, TypeError, ValueError) as error:
            outcome = str(error)  # a notebook shows it at the end of a cell that worked
        return f"Run({printable(str(self.path))!r}): {printable(outcome)}"

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"

    def _outcome(self) -> str:
        steps = self.summary.get("optimizer_steps", len(read_json_lines(self.path / "metrics.jsonl")))
        parts = [self.status, f"{steps} of {self.config['training']['steps']} steps"]
        validations = self.validations
        for key in ("solved", "reward_mean", "nll_per_token"):
            values = [validation[key] for validation in validations if validation.get(key) is not None]
            if values:
                change = [values[0], values[-1]] if len(values) > 1 else values
                parts.append(f"{key} " + " -> ".join(f"{value:.3f}" for value in change))
                break
        return ", ".join(parts)


def summary_of(run: Path) -> dict[str, Any] | None:
    """Returns ``summary.json``; None for a run that has not ended or was killed.

    Raises:
        DamagedFile: If the file is damaged.
    """
    path = run / "summary.json"
    found = read_json(path)
    if found is not None and not isinstance(found, dict):
        raise damaged(path, TypeError("it is not a JSON object"))
    return found


def _table(rows: list[dict[str, Any]]) -> Any:
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows)
