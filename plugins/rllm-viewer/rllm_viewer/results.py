"""The result of a run, read from its folder: its status, steps, and rewards from first to last.

It is cheap enough for hundreds of folders: of a long file, it reads only the first line, the last, and a few between.
"""

from __future__ import annotations

import fcntl
import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rllm_core.errors import ConfigError, RunError, UserError
from rllm_core.run_folder.journal import read_json_lines
from rllm_core.run_folder.run import summary_of
from rllm_core.text import counted

VALIDATION_MEASURES = ("solved", "reward_mean", "nll_per_token")
MEASURES = (*VALIDATION_MEASURES, "loss")
"""Measures that can describe a run, the preferred one first. ``loss`` exists for training steps only."""

SAMPLES = 24
CHUNK_BYTES = 1 << 16
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True)
class RunResult:
    """The summary of one run.

    Attributes:
        path: Run folder.
        status: ``running``, ``interrupted`` (killed) or ``damaged``, or the status in ``summary.json``.
        error: Why the run failed, or why its folder cannot be read.
        steps: Optimizer steps so far.
        measure: The measure of `first` and `last`, one of `MEASURES`; None if the run has measured nothing.
        source: ``validation`` if they come from the first and last validation, ``training`` if from training steps.
        curve: Evenly spaced values of the training steps; None for a step without one.
        started: When the last launch started, in seconds since the epoch.
        tokens: Tokens to and from models so far, without training tokens; None if the run has not reported them.
        money: Cost of the run by its configured prices; None without prices.
        changed: When the run last wrote a step, its summary or its events, in seconds since the epoch.
    """

    path: Path
    status: str
    error: str | None = None
    workflow: str | None = None
    backend: str | None = None
    steps: int | None = None
    planned_steps: int | None = None
    measure: str | None = None
    source: str | None = None
    first: float | None = None
    last: float | None = None
    curve: tuple[float | None, ...] = ()
    tokens: int | None = None
    money: float | None = None
    started: float | None = None
    changed: float | None = None


def result_of(run: Path) -> RunResult:
    """Returns the result of a run; a damaged folder also gives a result."""
    try:
        return _result(run)
    except (UserError, *DAMAGED) as error:
        what = f"{error.filename or run}: {error.strerror}" if isinstance(error, OSError) else str(error)
        return RunResult(run, "damaged", error=what or type(error).__name__, changed=_changed(run))


def run_folders(folder: Path) -> list[Path]:
    """Returns the run folders in a folder, sorted by name, or the folder itself if it is one.

    Raises:
        ConfigError: If there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; name a folder of runs (default: ./runs)")
    if _is_run(folder):
        return [folder]
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and _is_run(entry))


def tables_of(run: Path) -> dict[str, Any]:
    """Returns the parsed run file of a run.

    Raises:
        ConfigError: If the folder is not a run folder, or its run file is damaged.
    """
    file = run_file_of(run)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def run_file_of(run: Path) -> Path:
    """Returns the path of a run's run file.

    Raises:
        ConfigError: If the folder is not a run folder.
    """
    file = run / "run.toml"
    if not file.is_file():
        inside = [folder for folder in run_folders(run) if folder != run] if run.is_dir() else []
        hint = f"; name one of the runs in it, such as {inside[-1]}" if inside else ""
        raise ConfigError(f"{run} is not a run folder: it has no run.toml{hint}")
    return file


def where_rollouts_ran(run: Path) -> str | None:
    """Returns where the last launch ran its rollouts and what it lost there; None for the run's own process."""
    host = (summary_of(run) or {}).get("rollout_host", {"name": "inline"})
    if host["name"] == "inline":
        return None
    lost = ""
    if host["restarts"]:
        lost = f"; lost {counted(host['restarts'], 'worker')}, with {counted(host['lost_rollouts'], 'rollout')}"
    return f"rollouts ran in {host['where']}{lost}"


def validations(run: Path) -> list[dict[str, Any]]:
    """Returns all validation events of a run, in order.

    Raises:
        RunError: If the file is damaged, or the run has ended and some are missing.
    """
    path, found, summary = run / "events.jsonl", [], summary_of(run) or {}
    try:
        with path.open(encoding="utf-8") if path.is_file() else nullcontext(()) as lines:
            for line in lines:
                # An active or killed run may end in an incomplete line.
                if line.startswith('{"event":"validation"') and line.endswith("\n"):
                    found.append(json.loads(line))
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from error
    _check_complete(path, len(found), len(summary.get("validation", ())), "validation", summary)
    return found


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Returns the metrics of all steps of a run, in order.

    Raises:
        RunError: If a line is damaged, or the run has ended and steps are missing.
    """
    summary = summary_of(run) or {}  # read before the metrics: a running run writes it after them
    path = run / "metrics.jsonl"
    rows = read_json_lines(path)
    _check_complete(path, len(rows), summary.get("optimizer_steps", 0), "step", summary)
    return rows


def _check_complete(path: Path, lines: int, expected: int, what: str, summary: Mapping[str, Any]) -> None:
    # A run may fail between its last step or validation, and the line of it.
    if lines < expected - (summary.get("status") != "completed"):
        raise RunError(
            f"{path} is damaged: it has {lines} of {counted(expected, what)} of summary.json; restore the file from a "
            "copy"
        )


def _result(run: Path) -> RunResult:
    tables = tables_of(run)
    summary = summary_of(run)
    curve = _samples(run / "metrics.jsonl")
    last_step = curve[-1].get("step", 0) if curve else 0
    spent = (summary or {}).get("costs") or _spent(run)
    points = [one for one in (summary or {}).get("validation", ()) if isinstance(one, dict)]
    measure, source, values = None, None, list[float | None]()
    sources = [("validation", points), ("training", curve)]
    if len(points) == 1:  # a run stopped before its second validation: the first one would be shown as its result
        sources.reverse()
    for name, rows in sources:
        measure = next((each for each in MEASURES if any(row.get(each) is not None for row in rows)), None)
        if measure is not None:
            source, values = name, [row.get(measure) for row in rows]
            break
    known = [float(value) for value in values if value is not None]
    drawn = next((each for each in MEASURES if any(row.get(each) is not None for row in curve)), "")
    status = summary["status"] if summary is not None else "running" if is_running(run) else "interrupted"
    return RunResult(
        run,
        str(status),
        error=(summary or {}).get("error"),
        workflow=str(tables.get("workflow", "")) or None,
        backend=str(tables.get("backend", "")) or None,
        steps=int((summary or {}).get("optimizer_steps", last_step)),
        planned_steps=tables.get("training", {}).get("steps"),
        measure=measure,
        source=source,
        first=known[0] if known else None,
        last=known[-1] if known else None,
        curve=tuple(None if row.get(drawn) is None else float(row[drawn]) for row in curve),
        tokens=spent.get("tokens"),
        money=spent.get("money"),
        started=(run / "run.toml").stat().st_mtime,
        changed=_changed(run),
    )


def _spent(run: Path) -> dict[str, Any]:
    """Returns the cost of a run without a summary after its last step, if its last timing line can be read."""
    try:
        timings = _samples(run / "timings.jsonl")
    except ValueError:
        return {}  # The run is valid without its timings.
    return {name: timings[-1].get(f"spent_{name}") for name in ("tokens", "money")} if timings else {}


def is_running(run: Path) -> bool:
    """Whether a process has the run folder locked.

    It holds a shared lock for microseconds only, because a run that starts meanwhile cannot get its own lock.
    """
    try:
        with (run / ".lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("run.toml", "events.jsonl", "summary.json"))


def _changed(run: Path) -> float | None:
    files = (run / name for name in ("summary.json", "metrics.jsonl", "events.jsonl", "run.toml"))
    return max((file.stat().st_mtime for file in files if file.is_file()), default=None)


def _samples(path: Path) -> list[dict[str, Any]]:
    """Returns the first line of a JSON Lines file, its last complete one, and some between."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        found = {0: _line_at(file, 0)}
        for number in range(1, SAMPLES - 1):
            at, line = _line_after(file, size * number // (SAMPLES - 1))
            found[at] = line
        at, line = _last_line(file, size)
        found[at] = line
    lines = [found[at] for at in sorted(found)]
    try:
        return [json.loads(line) for line in lines if line.endswith(b"\n")]
    except ValueError as error:
        raise ValueError(f"{path.name} has a line that is not JSON: {error}") from error


def _line_at(file: BinaryIO, at: int) -> bytes:
    file.seek(at)
    return file.readline()


def _line_after(file: BinaryIO, at: int) -> tuple[int, bytes]:
    """Returns the start and content of the first whole line after a position."""
    file.seek(at)
    file.readline()
    return file.tell(), file.readline()


def _last_line(file: BinaryIO, size: int) -> tuple[int, bytes]:
    """Returns the start and content of the last complete line; a run may be writing another."""
    for start, tail in _tails(file, size):
        end = tail.rfind(b"\n")
        before = tail.rfind(b"\n", 0, max(end, 0))
        if end >= 0 and (before >= 0 or start == 0):
            return start + before + 1, tail[before + 1 : end + 1]
    return 0, b""


def _tails(file: BinaryIO, size: int) -> Iterator[tuple[int, bytes]]:
    length = CHUNK_BYTES
    while True:
        start = max(0, size - length)
        file.seek(start)
        yield start, file.read(size - start)
        if start == 0:
            return
        length *= 4
