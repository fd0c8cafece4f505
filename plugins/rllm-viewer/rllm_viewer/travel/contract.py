"""What a format is: rows from rollouts, and rollouts from rows."""

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
        started: When it started, as ISO 8601.
    """

    name: str
    tables: Mapping[str, Any]
    started: str

    @property
    def model(self) -> str:
        """The model that it trained."""
        path = self.tables.get("model", {}).get("path")
        return str(path or f"the default model of backend {self.tables.get('backend')}")


@dataclass(frozen=True)
class Located:
    """A row of a file, with where it is, for messages."""

    where: str
    row: Row


@dataclass
class Imported:
    """Some steps of one trajectory, as a row of a file has them, and what the row says about their rollout.

    Attributes:
        where: Where the row is, for messages.
        steps: Fields of the steps; also ``trained_advantages`` and the other measures of each.
        task: ``task_id`` and ``data``.
        group: ``step``, ``group`` and ``kept``.
        rollout: ``outcome``, ``reason`` and fields of the episode.
        trajectory: Fields of the trajectory, and its ``number`` in the rollout. Without a number, the row is a
            trajectory of its own.
        together: Rows with the same value are of one group; of an own one if it is None.
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
    """A format of others.

    Attributes:
        name: Name on the command line.
        summary: What it is for.
        holds: Names of the fields that it holds (`rllm_viewer.travel.fields`).
        suffixes: Suffixes of files that it can be written to.
        rows: Yields the rows of rollouts. It counts what it cannot write, except fields that it does not hold.
        read: Yields what rows say. It counts what it does not read.
        is_dataset: Whether a folder with one file per split can be written.
        as_text: Columns that a Parquet file has as JSON text, since a column has one type for all rows.
    """

    name: str
    summary: str
    holds: frozenset[str]
    suffixes: tuple[str, ...]
    rows: Callable[[Iterable[Picked], Source, Losses], Iterator[Row]]
    read: Callable[[Iterable[Located], Losses], Iterator[Imported]]
    is_dataset: bool = False
    as_text: Sequence[str] = ()
