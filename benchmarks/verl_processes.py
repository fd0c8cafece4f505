"""CPU seconds of a side of a comparison on one Ray cluster: of all its processes, wherever they came from.

A process belongs to the side that its environment names, which Ray and vLLM hand on to their children. The cluster's
own (Ray's daemons, workers that no side has asked for yet) serve whoever's turn it is.
"""

from __future__ import annotations

import os
from pathlib import Path

SIDE_VARIABLE = "RLLM_BENCHMARK_SIDE"
"""In the environment of every process of a side, and says which."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
Times = dict[str, dict[str, float]]


def cpu_seconds() -> Times:
    """User and system time so far, by side and by what the process is called.

    A process that has ended counts with the one that waited for it, so that sums over all processes only grow.
    """
    times: Times = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().split(b"\0")
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is somebody else's
            continue
        for entry in environment:
            variable, _, side = entry.decode(errors="replace").partition("=")
            if variable == SIDE_VARIABLE:
                ticks = sum(map(int, fields[11:15]))  # its own, and those of children that have ended
                of_side, name = times.setdefault(side, {}), called(command)
                of_side[name] = of_side.get(name, 0.0) + ticks / CLOCK_TICKS
    return times


def called(command: list[bytes]) -> str:
    """What a process is, from its command line: Ray's and vLLM's write a title there."""
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
    """Seconds by process name between two readings; names that spent nothing are left out."""
    earlier, later = before.get(side, {}), after.get(side, {})
    used = {name: later.get(name, 0.0) - earlier.get(name, 0.0) for name in sorted(earlier.keys() | later.keys())}
    return {name: round(seconds, 2) for name, seconds in used.items() if round(seconds, 2)}
