"""The contract of a format: rows from rollouts, and rollouts from rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm_viewer.travel.fields import Losses
from rllm_viewer.travel.selection import Picked

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """The run that is exported.

    Attributes:
        name: Name of its folder.
        tables: Its run file.
        started: Start time of the run, in ISO 8601.
    """

    name: str
    tables: Mapping[str, Any]
    started: str

    @property
    def model(self) -> str:
        """The model that the run trained."""
        path = self.tables.get("model", {}).get("path")
        return str(path or f"the default model of backend {self.tables.get('backend')}")


@dataclass(frozen=True)
class Located:
    """A row of a file with its location, for messages."""

    where: str
    row: Row


@dataclass
class Imported:
    """Some steps of one trajectory from a row of a file, with the row's facts about their rollout.

    Attributes:
        where: Location of the row, for messages.
        steps: Fields of the steps; also ``trained_advantages`` and the other measures of each.
        task: ``task_id`` and ``data``.
        group: ``step``, ``group`` and ``kept``.
        rollout: ``outcome``, ``reason`` and fields of the episode.
        trajectory: Fields of the trajectory, and its ``number`` in the rollout. Without a number, the row is a
            trajectory of its own.
        together: Rows with the same value belong to one group; None gives the row a group of its own.
    """

    where: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    task: dict[str, Any] = field(default_factory=dict)
    group: dict[str, Any] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)
    trajectory: dict[str, Any] = field(default_factory=dict)
    together: str | None = None


@dataclass(frozen=True)
class Format:
    """A format of another tool.

    Attributes:
        name: Name on the command line.
        summary: Its purpose.
        holds: Names of the fields that the format can hold (`rllm_viewer.travel.fields`).
        suffixes: Suffixes of files that it can be written to.
        rows: Yields the rows of rollouts. It counts what it cannot write, except fields that the format does not hold.
        read: Yields the contents of rows. It counts what it does not read.
        is_dataset: Whether a folder with one file per split can be written.
        as_text: Columns that a Parquet file stores as JSON text, since a column has one type for all rows.
    """

    name: str
    summary: str
    holds: frozenset[str]
    suffixes: tuple[str, ...]
    rows: Callable[[Iterable[Picked], Source, Losses], Iterator[Row]]
    read: Callable[[Iterable[Located], Losses], Iterator[Imported]]
    is_dataset: bool = False
    as_text: Sequence[str] = ()
