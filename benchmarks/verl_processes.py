"""CPU seconds of all processes of one side of a comparison on a Ray cluster.

An environment variable, which Ray and vLLM pass on to their children, names the side of a process. The cluster's own
processes (Ray's daemons, workers not yet assigned) serve the side whose turn it is.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

SIDE_VARIABLE = "RLLM_BENCHMARK_SIDE"
"""Environment variable that names the side of a process."""
CLUSTER = "cluster"
"""Side of the cluster's own processes."""
UNREADABLE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Errors of reading a process that has ended, or that belongs to another user."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
Times = dict[str, dict[str, float]]
ResultT = TypeVar("ResultT")
ParametersT = ParamSpec("ParametersT")


def cpu_seconds() -> Times:
    """Returns user and system time so far, by side and process name.

    The time of an ended process counts for its parent, so sums over all processes never shrink.
    """
    times: Times = {}
    for folder, side in processes():
        try:
            name, seconds = called((folder / "cmdline").read_bytes().split(b"\0")), seconds_of(folder)
        except UNREADABLE:
            continue
        of_side = times.setdefault(side, {})
        of_side[name] = of_side.get(name, 0.0) + seconds
    return times


def processes() -> Iterator[tuple[Path, str]]:
    """Yields each process of a side, as its folder in ``/proc``, with the side."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            side = side_of(folder)
        except UNREADABLE:
            continue
        if side is not None:
            yield folder, side


def side_of(folder: Path) -> str | None:
    """Returns the side of the process with a folder in ``/proc``; None if it has none."""
    for entry in (folder / "environ").read_bytes().split(b"\0"):
        variable, _, side = entry.decode(errors="replace").partition("=")
        if variable == SIDE_VARIABLE:
            return side
    return None


def seconds_of(folder: Path) -> float:
    """Returns the CPU seconds so far of the process with a folder in ``/proc``, and of its ended children."""
    fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / CLOCK_TICKS


class Measured:
    """Adds up the CPU seconds that processes use during calls of an asynchronous function.

    The processes are found once, before the first call that is measured: to search them again takes more time than
    some calls. Those that wait in a loop for work, as vLLM's do, count with the time that they wait during a call.

    Args:
        sides: Sides of the processes.
        skipped: First calls that are not measured, while processes still start.
    """

    def __init__(self, sides: Iterable[str], skipped: int) -> None:
        self._sides = frozenset(sides)
        self._skipped = skipped
        self._folders: list[Path] = []
        self._seconds = 0.0

    def wrap(self, function: Callable[ParametersT, Awaitable[ResultT]]) -> Callable[ParametersT, Awaitable[ResultT]]:
        """Returns the function, measured."""

        async def measured(*arguments: ParametersT.args, **options: ParametersT.kwargs) -> ResultT:
            if self._skipped:
                self._skipped -= 1
                return await function(*arguments, **options)
            self._folders = self._folders or [folder for folder, side in processes() if side in self._sides]
            before = sum(map(seconds_of, self._folders))
            result = await function(*arguments, **options)
            self._seconds += sum(map(seconds_of, self._folders)) - before
            return result

        return measured

    def take(self) -> float:
        """Returns the seconds since the last time, and starts again from zero."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def called(command: list[bytes]) -> str:
    """Returns the name of a process from its command line, where Ray and vLLM write a title."""
    words = [word.decode(errors="replace") for word in command if word]
    if not words:
        return "ended"
    title = words[0]
    if title.startswith("ray::"):
        return title.split(".")[0].split(" ")[0].split("(")[0]
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return Path(title.split(" ")[0]).name


def spent(before: Times, after: Times, side: str) -> dict[str, float]:
    """Returns the seconds by process name between two readings, without names that used none."""
    earlier, later = before.get(side, {}), after.get(side, {})
    used = {name: later.get(name, 0.0) - earlier.get(name, 0.0) for name in sorted(earlier.keys() | later.keys())}
    return {name: round(seconds, 2) for name, seconds in used.items() if round(seconds, 2)}
