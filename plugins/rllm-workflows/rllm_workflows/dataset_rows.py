"""Rows of a data set, whatever it is kept in: JSON lines, parquet, a saved data set of Hugging Face, or one of its hub.

What stays in memory of a row is its place in the file, or Arrow's columns; it becomes Python objects when it is read.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rllm_core.errors import ConfigError
from rllm_core.loading import suggest

ROWS_PER_READ = 1000

Row = Mapping[str, Any]


class Rows(ABC):
    """Rows with a place that people can find again.

    Args:
        source: Name of the file, the folder or the data set, for messages.
    """

    def __init__(self, source: str) -> None:
        self.source = source

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Row]:
        """All rows in order."""

    @abstractmethod
    def __getitem__(self, index: int) -> Row:
        """One row, read now."""

    @abstractmethod
    def where(self, index: int) -> str:
        """The place of a row."""


class JsonLines(Rows):
    """An object per line; of each line, only its place stays in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self._starts, self._numbers = array("Q"), array("Q")
        start = 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self._starts.append(start)
                        self._numbers.append(number)
                    start += len(line)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        self._end = start

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Row]:
        with self._path.open("rb") as file:
            index = 0
            for line in file:
                if line.strip():
                    yield self._parsed(index, line)
                    index += 1

    def __getitem__(self, index: int) -> Row:
        end = self._starts[index + 1] if index + 1 < len(self) else self._end
        try:
            with self._path.open("rb") as file:
                file.seek(self._starts[index])
                return self._parsed(index, file.read(end - self._starts[index]))
        except OSError as error:
            raise ConfigError(f"{self.where(index)} can no longer be read: {error.strerror}") from error

    def where(self, index: int) -> str:
        """See `Rows`."""
        return f"{self.source} line {self._numbers[index]}"

    def _parsed(self, index: int, line: bytes) -> Row:
        try:
            row = json.loads(line.decode("utf-8-sig" if index == 0 else "utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{self.where(index)} is not UTF-8: byte {line[error.start]:#04x} at position {error.start + 1}; "
                "save the file as UTF-8"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.where(index)} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{self.where(index)} is {type(row).__name__}; each line must be a JSON object {{...}}")
        return row


class _ArrowRows(Rows):
    """Rows of Arrow tables."""

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), ROWS_PER_READ):
            yield from map(_row, self._table(start, min(start + ROWS_PER_READ, len(self))).to_pylist())

    def __getitem__(self, index: int) -> Row:
        rows: list[Row] = self._table(index, index + 1).to_pylist()
        return _row(rows[0])

    def where(self, index: int) -> str:
        """See `Rows`."""
        return f"{self.source} row {index + 1}"

    @abstractmethod
    def _table(self, start: int, stop: int) -> Any:
        """Some rows as a table."""


class Parquet(_ArrowRows):
    """A file of parquet, whose wanted columns stay in memory as Arrow keeps them."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        super().__init__(str(path))
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise ConfigError(f"{path} needs pyarrow: pip install 'rllm-workflows[parquet]'") from error
        try:
            known = parquet.read_schema(path).names
            check_columns(self.source, columns, known)
            self._whole = parquet.read_table(path, columns=list(columns))
        except (ArrowException, OSError) as error:
            raise ConfigError(f"{path} cannot be read as Parquet: {_one_line(error)}") from error

    def __len__(self) -> int:
        return int(self._whole.num_rows)

    def _table(self, start: int, stop: int) -> Any:
        return self._whole.slice(start, stop - start)


class HuggingFace(_ArrowRows):
    """A data set of the library ``datasets``, which maps its files into memory.

    Args:
        source: What it was opened from, for messages.
        dataset: A `datasets.Dataset`.
        columns: Those that are wanted.
    """

    def __init__(self, source: str, dataset: Any, columns: Sequence[str]) -> None:
        super().__init__(source)
        check_columns(source, columns, dataset.column_names)
        self._dataset = dataset.select_columns(list(columns)).with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def _table(self, start: int, stop: int) -> Any:
        return self._dataset[start:stop]


def open_file(path: Path, columns: Sequence[str]) -> Rows:
    """The rows of a file, by its name's ending.

    Raises:
        ConfigError: If there is no such file, it is of no known format or lacks a column.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist" + (", or is not a file" if path.exists() else ""))
    if path.suffix == ".parquet":
        return Parquet(path, columns)
    if path.suffix == ".jsonl":
        return JsonLines(path)
    raise ConfigError(f"{path} must end in .jsonl or .parquet")


def open_saved(folder: Path, split: str, columns: Sequence[str]) -> tuple[Rows, list[str]]:
    """The rows that ``save_to_disk`` wrote.

    Returns:
        The rows, and the splits that are there; none if the folder holds a data set without splits.

    Raises:
        ConfigError: If it holds none, lacks the split or a column, or ``datasets`` is not installed.
    """
    datasets = _library(str(folder))
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist, or was not written by save_to_disk")
    try:
        found = datasets.load_from_disk(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} cannot be opened as a saved dataset: {_one_line(error)}") from error
    if not isinstance(found, datasets.DatasetDict):
        return HuggingFace(str(folder), found, columns), []
    if split not in found:
        raise ConfigError(f"{folder} has no split {split!r}; {suggest(split, list(found))}")
    return HuggingFace(f"{folder} split {split!r}", found[split], columns), list(found)


def open_hub(name: str, subset: str, revision: str, split: str, columns: Sequence[str]) -> Rows:
    """One split of a data set of the hub, downloaded if it is not in the cache of ``datasets`` already.

    Raises:
        ConfigError: If there is none, it lacks a column, it cannot be had, or ``datasets`` is not installed.
    """
    datasets = _library(name)
    try:
        found = datasets.load_dataset(name, subset or None, split=split, revision=revision or None)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"{name} split {split!r} cannot be loaded from the Hugging Face Hub: {_one_line(error)}"
        ) from error
    return HuggingFace(f"{name} split {split!r}", found, columns)


def check_columns(source: str, wanted: Sequence[str], known: Sequence[str]) -> None:
    """Compare names of columns.

    Raises:
        ConfigError: If a wanted one is not known; suggests the nearest.
    """
    for column in wanted:
        if column not in known:
            raise ConfigError(f"{source} has no column {column!r}; {suggest(column, list(known))}")


def _library(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"{source} needs datasets: pip install 'rllm-workflows[huggingface]'") from error
    return datasets


def _row(row: Row) -> Row:
    """As JSON lines would have it, but with every column, so that it can be told which is null."""
    return {column: _without_nulls(value) for column, value in row.items()}


def _without_nulls(value: Any) -> Any:
    """Without the keys that other rows have and this one lacks, which Arrow fills in."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
