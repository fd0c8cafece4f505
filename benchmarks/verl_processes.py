"""CPU seconds of all processes of one side of a comparison on a Ray cluster.

An environment variable, which Ray and vLLM pass on to their children, names the side of a process. The cluster's own
processes (Ray's daemons, workers not yet assigned) serve the side whose turn it is.
"""

from __future__ import annotations

import os
from pathlib import Path

SIDE_VARIABLE = "RLLM_BENCHMARK_SIDE"
"""Environment variable that names the side of a process."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
Times = dict[str, dict[str, float]]


def cpu_seconds() -> Times:
    """Returns user and system time so far, by side and process name.

    The time of an ended process counts for its parent, so sums over all processes never shrink.
    """
    times: Times = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().split(b"\0")
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or belongs to another user
            continue
        for entry in environment:
            variable, _, side = entry.decode(errors="replace").partition("=")
            if variable == SIDE_VARIABLE:
                ticks = sum(map(int, fields[11:15]))  # its own, and those of ended children
                of_side, name = times.setdefault(side, {}), called(command)
                of_side[name] = of_side.get(name, 0.0) + ticks / CLOCK_TICKS
    return times


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
