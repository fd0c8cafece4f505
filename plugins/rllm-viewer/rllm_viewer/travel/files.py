"""Reads and writes files of rows: JSON Lines, Parquet, or one JSON document, by suffix."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rllm_core.errors import ConfigError, RunError
from rllm_viewer.travel.contract import Located, Row

ROWS_PER_GROUP = 1000
PYARROW = "needs pyarrow: pip install 'rllm-viewer[parquet]'"


def write(path: Path, rows: Iterable[Row], as_text: Sequence[str]) -> int:
    """Writes rows to a new file, which appears once it is complete, and returns their number.

    Raises:
        ConfigError: If the rows do not fit this kind of file, or pyarrow is missing.
        RunError: If the disk rejects a write.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        count = {".jsonl": _write_lines, ".parquet": _write_parquet, ".json": _write_document}[path.suffix](
            partial, rows, as_text
        )
        partial.rename(path)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        if partial.exists():  # even to unlink a file that does not exist is an error on a read-only file system
            partial.unlink()
    return count


def read(path: Path) -> Iterator[Located]:
    """Yields the rows of a file with their locations.

    Raises:
        ConfigError: If the file cannot be read, or a row is broken; the message names the row.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")
    try:
        if path.suffix == ".parquet":
            yield from _read_parquet(path)
        elif path.suffix == ".jsonl":
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _located(f"{path} line {number}", line)
        else:
            yield _located(str(path), path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _located(where: str, text: bytes) -> Located:
    try:
        row = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is {type(row).__name__}; it must be a JSON object")
    return Located(where, row)


def _write_lines(path: Path, rows: Iterable[Row], _: Sequence[str]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
            count += 1
    return count


def _write_document(path: Path, rows: Iterable[Row], _: Sequence[str]) -> int:
    found = list(rows)
    if len(found) != 1:
        raise ConfigError(f"a .json file holds one document, but there are {len(found)}; write to a .jsonl file")
    path.write_text(json.dumps(found[0], ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return 1


def _write_parquet(path: Path, rows: Iterable[Row], as_text: Sequence[str]) -> int:
    pyarrow, parquet = _pyarrow(path)
    found = [{key: json.dumps(value) if key in as_text else value for key, value in row.items()} for row in rows]
    # Arrow takes the columns from the first row only.
    columns = list(dict.fromkeys(key for row in found for key in row))
    try:
        table = pyarrow.table({key: [row.get(key) for row in found] for key in columns})
        parquet.write_table(table, path, row_group_size=ROWS_PER_GROUP)
    except pyarrow.ArrowException as error:
        raise ConfigError(
            f"the rows do not fit into the columns of a Parquet file ({_one_line(error)}); write to a .jsonl file"
        ) from error
    return len(found)


def _read_parquet(path: Path) -> Iterator[Located]:
    pyarrow, parquet = _pyarrow(path)
    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {_one_line(error)}") from error
    for number in range(table.num_rows):
        [row] = table.slice(number, 1).to_pylist()
        yield Located(f"{path} row {number + 1}", _without_nulls(row))


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{path} {PYARROW}") from error
    return pyarrow, parquet


def _without_nulls(value: Any) -> Any:
    """Removes keys that Arrow adds because other rows have them."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
