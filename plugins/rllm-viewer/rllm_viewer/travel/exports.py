"""Writes rollouts to a file of a format, and reads such a file into a run folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any, get_args

from rllm_core.errors import ConfigError, RunError
from rllm_viewer.results import tables_of
from rllm_viewer.travel import files, folder
from rllm_viewer.travel.contract import Format, Located, Row, Source
from rllm_viewer.travel.fields import Losses
from rllm_viewer.travel.selection import Filters, Picked, Split, picked, state_of

FILE_OF_SPLIT = {"training": "train", "validation": "validation"}


@dataclass
class _Counted:
    """Counts rollouts on their way to a file."""

    format: Format
    losses: Losses = field(default_factory=Losses)
    rollouts: int = 0
    groups: set[tuple[Any, ...]] = field(default_factory=set)

    def passing(self, found: Iterator[Picked]) -> Iterator[Picked]:
        """Yields the rollouts unchanged, and counts them."""
        for one in found:
            self.rollouts += 1
            self.groups.add((one.group.step, one.group.group, one.group.task.task_id, one.group.outcome))
            self.losses.of_rollout(one, self.format.holds)
            yield one


def export(run: Path, out: Path, kind: Format, filters: Filters) -> dict[str, Any]:
    """Writes the chosen rollouts of a run.

    Args:
        run: Run folder.
        out: New file; for a dataset, also a new folder, which gets a file per split.
        kind: Name of the format.
        filters: Which rollouts to export.

    Returns:
        JSON object: ``run, format, files, rows, rollouts, groups, lost, state``.

    Raises:
        ConfigError: If the run or the file is not usable, or no rollout is chosen.
        RunError: If the run is damaged, or the disk rejects a write.
    """
    source = Source(run.resolve().name, tables_of(run), _started(run))
    state = state_of(run)
    counted = _Counted(kind)
    if out.exists():
        raise ConfigError(f"{out} exists; choose another name")

    def rows(wanted: Filters) -> Iterator[Row]:
        return kind.rows(counted.passing(picked(run, wanted)), source, counted.losses)

    written: dict[str, int] = {}
    if out.suffix == "" and kind.is_dataset:
        splits: tuple[Split, ...] = get_args(Split) if filters.split is None else (filters.split,)
        try:
            for split in splits:
                path = out / f"{FILE_OF_SPLIT[split]}.jsonl"
                written[str(path)] = files.write(path, rows(replace(filters, split=split)), kind.as_text)
        except BaseException:
            if out.exists():
                shutil.rmtree(out)
            raise
    elif out.suffix in kind.suffixes:
        written[str(out)] = files.write(out, rows(filters), kind.as_text)
    else:
        allowed = " or ".join([*kind.suffixes, *(["no suffix, for a folder"] if kind.is_dataset else [])])
        raise ConfigError(f"{out}: a file of format {kind.name} must end in {allowed}")
    kept = {path: count for path, count in written.items() if count and counted.rollouts}
    for empty in written.keys() - kept.keys():
        Path(empty).unlink()
    if not kept:
        if out.is_dir():
            out.rmdir()
        chosen = (
            "the chosen rollouts have none" if counted.rollouts else "no recorded rollout is chosen by these filters"
        )
        raise ConfigError(f"nothing to export: {chosen}; rllm-core show {quote(str(run))} lists what is recorded")
    return {
        "run": str(run),
        "format": kind.name,
        "files": kept,
        "rows": sum(kept.values()),
        "rollouts": counted.rollouts,
        "groups": len(counted.groups),
        "lost": dict(sorted(counted.losses.counts.items())),
        "state": state,
    }


def bring_in(file: Path, kind: Format, out: Path) -> dict[str, Any]:
    """Reads a file of a format into a run folder.

    Returns:
        JSON object: ``file, format, folder, rows, rollouts, groups, lost``.

    Raises:
        ConfigError: If a row is broken, or the folder is not empty.
        RunError: If the disk rejects a write.
    """
    losses, rows = Losses(), 0

    def located() -> Iterator[Located]:
        nonlocal rows
        for one in files.read(file):
            rows += 1
            yield one

    groups, rollouts = folder.write(out, file, kind.name, folder.groups_of(kind.read(located(), losses), losses))
    return {
        "file": str(file),
        "format": kind.name,
        "folder": str(out),
        "rows": rows,
        "rollouts": rollouts,
        "groups": groups,
        "lost": dict(sorted(losses.counts.items())),
    }


def _started(run: Path) -> str:
    try:
        return datetime.fromtimestamp((run / "run.toml").stat().st_mtime, UTC).isoformat()
    except OSError as error:
        raise RunError(f"{run / 'run.toml'} cannot be read: {error.strerror}") from error
