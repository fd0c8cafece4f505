"""Rows of datasets: JSON Lines, Parquet, saved Hugging Face datasets, and datasets on the Hugging Face Hub.

Only a row's position in the file, or its Arrow columns, stays in memory. Reading a row creates the Python objects.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rllm_core.errors import ConfigError
from rllm_core.plugins.loading import suggest

ROWS_PER_READ = 1000

Row = Mapping[str, Any]


class DatasetRows(ABC):
    """Rows of one source, with locations for messages.

    Args:
        source: Name of the file, folder or dataset, for messages.
    """

    def __init__(self, source: str) -> None:
        self.source = source

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Row]:
        """Yields all rows in order."""

    @abstractmethod
    def __getitem__(self, index: int) -> Row:
        """Reads one row."""

    @abstractmethod
    def where(self, index: int) -> str:
        """Returns the location of a row, for messages."""


class JsonLinesDataset(DatasetRows):
    """A file with one JSON object per line; only the position of each line stays in memory."""

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
        """See `DatasetRows`."""
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


class _ArrowRows(DatasetRows):
    """Rows of Arrow tables."""

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), ROWS_PER_READ):
            yield from map(_row, self._table(start, min(start + ROWS_PER_READ, len(self))).to_pylist())

    def __getitem__(self, index: int) -> Row:
        rows: list[Row] = self._table(index, index + 1).to_pylist()
        return _row(rows[0])

    def where(self, index: int) -> str:
        """See `DatasetRows`."""
        return f"{self.source} row {index + 1}"

    @abstractmethod
    def _table(self, start: int, stop: int) -> Any:
        """Returns a range of rows as a table."""


class Parquet(_ArrowRows):
    """A Parquet file; its wanted columns stay in memory in Arrow's format."""

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
    """A dataset of the library ``datasets``, which maps its files into memory.

    Args:
        source: Origin of the dataset, for messages.
        dataset: A `datasets.Dataset`.
        columns: Wanted columns.
    """

    def __init__(self, source: str, dataset: Any, columns: Sequence[str]) -> None:
        super().__init__(source)
        check_columns(source, columns, dataset.column_names)
        self._dataset = dataset.select_columns(list(columns)).with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def _table(self, start: int, stop: int) -> Any:
        return self._dataset[start:stop]


def open_file(path: Path, columns: Sequence[str]) -> DatasetRows:
    """Opens a file; its suffix determines the format.

    Raises:
        ConfigError: If the file does not exist, its format is unknown, or it lacks a column.
    """
    if not path.is_file():
        raise ConfigError(missing(path))
    if path.suffix == ".parquet":
        return Parquet(path, columns)
    if path.suffix == ".jsonl":
        return JsonLinesDataset(path)
    raise ConfigError(f"{path} must end in .jsonl or .parquet")


def missing(path: Path) -> str:
    """Returns the error for a path that is no file."""
    if path.exists():
        return f"{path} does not exist, or is not a file"
    return f"{path} does not exist" + ("" if path.is_absolute() else f" in the working directory {Path.cwd()}")


def open_saved(folder: Path, split: str, columns: Sequence[str]) -> tuple[DatasetRows, list[str]]:
    """Opens a folder written by ``save_to_disk``.

    Returns:
        The rows, and the names of the splits; no names if the dataset has no splits.

    Raises:
        ConfigError: If the folder contains no dataset, lacks the split or a column, or ``datasets`` is not installed.
    """
    datasets = _library(str(folder))
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist, or was not written by save_to_disk")
    try:
        found = datasets.load_from_disk(folder)
    except IndexError as error:  # of datasets, if there is no file with rows
        raise ConfigError(f"{folder} has no rows, or a split without rows") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} cannot be opened as a saved dataset: {_one_line(error)}") from error
    if not isinstance(found, datasets.DatasetDict):
        return HuggingFace(str(folder), found, columns), []
    if split not in found:
        raise ConfigError(f"{folder} has no split {split!r}; {suggest(split, list(found))}")
    return HuggingFace(f"{folder} split {split!r}", found[split], columns), list(found)


def open_hub(name: str, subset: str, revision: str, split: str, columns: Sequence[str]) -> DatasetRows:
    """Opens one split of a dataset on the Hugging Face Hub, from the cache of ``datasets`` or by downloading it.

    Raises:
        ConfigError: If the split does not exist, lacks a column or cannot be loaded, or ``datasets`` is not installed.
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
    """Checks that all wanted columns exist.

    Raises:
        ConfigError: If a wanted column is unknown; the message suggests the closest name.
    """
    for column in wanted:
        if column not in known:
            hint = f"; dataset.{column} names another column" if column in ("question", "answer") else ""
            raise ConfigError(f"{source} has no column {column!r}; {suggest(column, list(known))}{hint}")


def _library(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"{source} needs datasets: pip install 'rllm-workflows[huggingface]'") from error
    return datasets


def _row(row: Row) -> Row:
    """Returns a row as JSON Lines would have it, but keeps null columns, so that messages can name them."""
    return {column: without_nulls(value) for column, value in row.items()}


def without_nulls(value: Any) -> Any:
    """Removes the null values that Arrow fills in for keys that only other rows have."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
