"""Reads the rows of a file as tasks."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rllm_core.errors import ConfigError
from rllm_core.types import Task, freeze
from rllm_core.workflow import Split

_SHARE = 1 << 32


def read_rows(train_file: str, validation_file: str, held_out_share: float) -> dict[Split, list[Task]]:
    """Returns the tasks of both splits.

    Raises:
        ConfigError: If a file cannot be read, a row is not a JSON object, or no row is left for training.
    """
    tasks = _tasks(train_file)
    if validation_file:
        found: dict[Split, list[Task]] = {"train": tasks, "validation": _tasks(validation_file)}
        ids = {task.task_id for task in found["validation"]}
        if both := next((task for task in tasks if task.task_id in ids), None):
            raise ConfigError(f"row {both.task_id!r} is both in {train_file} and in {validation_file}")
    else:
        found = {"train": [], "validation": []}
        for task in tasks:
            drawn = int.from_bytes(hashlib.blake2b(task.task_id.encode(), digest_size=4).digest(), "big") / _SHARE
            found["validation" if drawn < held_out_share else "train"].append(task)
    if not found["train"]:
        raise ConfigError(f"{train_file} leaves no row for training")
    return found


def _tasks(file: str) -> list[Task]:
    try:
        # Not splitlines(), which also ends a line at characters that JSON allows in a string, such as U+2028.
        lines = Path(file).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError as error:
        where = "" if Path(file).is_absolute() else f" in the working directory {Path.cwd()}"
        raise ConfigError(f"the rows of agent cannot be read from {file}: there is no such file{where}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the rows of agent cannot be read from {file}: it is not UTF-8 text; give a .jsonl file, saved as UTF-8"
        ) from error
    except OSError as error:
        raise ConfigError(f"the rows of agent cannot be read from {file}: {error}") from error
    tasks: dict[str, Task] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _row(file, number, line)
        task_id = str(row["id"] if row.get("id") else hashlib.blake2b(line.strip().encode(), digest_size=8).hexdigest())
        if task_id in tasks:
            same = f"the id {task_id!r} is that of" if row.get("id") else "this row, which has no id, is equal to"
            raise ConfigError(f"{file}:{number}: {same} an earlier row")
        tasks[task_id] = Task(task_id=task_id, data=row)
    return list(tasks.values())


def _row(file: str, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f'a row is an object such as {{"question": "..."}}, not {type(row).__name__}')
        return freeze(row)  # type: ignore[no-any-return]
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}:{number}: {error}") from error
