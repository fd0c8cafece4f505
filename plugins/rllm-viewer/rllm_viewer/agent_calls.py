"""How agents used their endpoint: the calls, conversations and segments of a run or of one rollout.

Package rllm-gateway counts them, as metrics of its episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rllm_core.algorithms.samples import segments
from rllm_core.run_folder.journal import read_json_lines
from rllm_core.text import counted
from rllm_core.types import Episode
from rllm_viewer.terminal import labeled, number, pairs

PREFIX = "gateway_"
METRIC_PREFIX = f"workflow/{PREFIX}"
BREAKS = "segment_breaks/"
IGNORED = "ignored_"
RECENT_STEPS = 10
SHOWN = ("calls", "roots", "rewritten_answers")


def counts_of(metrics: Mapping[str, Any], prefix: str = PREFIX) -> dict[str, float]:
    """Returns the gateway's counts, by name without prefix; empty if the rollouts had no gateway."""
    return {name.removeprefix(prefix): float(value) for name, value in metrics.items() if name.startswith(prefix)}


def of_run(run: Path) -> dict[str, Any] | None:
    """Returns the mean counts per rollout over a run's latest steps; None if its rollouts had no gateway.

    Raises:
        OSError: If the metrics cannot be read.
        ValueError: If the metrics are damaged.
    """
    file = run / "metrics.jsonl"
    rows = [row for row in read_json_lines(file) if f"{METRIC_PREFIX}calls" in row] if file.is_file() else []
    if not (latest := rows[-RECENT_STEPS:]):
        return None
    names = sorted({name for row in latest for name in counts_of(row, METRIC_PREFIX)})
    trajectories = sum(row["trajectories"] for row in latest)
    breaks = {name.removeprefix(BREAKS) for row in latest for name in row if name.startswith(BREAKS)}
    return {
        "steps": len(latest),
        "counts": {name: _mean([row.get(f"{METRIC_PREFIX}{name}", 0.0) for row in latest]) for name in names},
        "segments_per_trajectory": sum(row["samples"] for row in latest) / trajectories if trajectories else None,
        "segment_breaks": {name: sum(row.get(f"{BREAKS}{name}", 0.0) for row in latest) for name in sorted(breaks)},
    }


def blocks(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yields the terminal blocks for the result of `of_run`."""
    counts = found["counts"]
    yield Text(f"agents, mean of a rollout in the last {counted(found['steps'], 'step')}:", style="bold")
    yield labeled("calls", _calls(counts))
    said = f"{number(found['segments_per_trajectory'])} per trajectory"
    if breaks := found["segment_breaks"]:
        said += f"; breaks in all: {pairs(breaks)}"
    yield labeled("segments", said)
    if more := _others(counts):
        yield labeled("also", more)


def of_rollout(episode: Episode) -> str:
    """Returns one line about a rollout; "" if it had no gateway."""
    counts = counts_of(episode.metrics)
    if "calls" not in counts:
        return ""
    total = sum(len(segments(trajectory.steps)) for trajectory in episode.trajectories)
    facts = [_calls(counts), counted(total, "segment"), _others(counts)]
    return "; ".join(fact for fact in facts if fact)


def _calls(counts: Mapping[str, float]) -> str:
    calls, roots, rewritten = (counts.get(name, 0.0) for name in SHOWN)
    said = f"{_counted(calls, 'call')} in {_counted(roots, 'conversation')}"
    return f"{said}, {_counted(rewritten, 'answer')} came back in other words" if rewritten else said


def _others(counts: Mapping[str, float]) -> str:
    ignored = {name.removeprefix(IGNORED): value for name, value in counts.items() if name.startswith(IGNORED)}
    others = {
        name.replace("_", " "): value
        for name, value in counts.items()
        if value and name not in SHOWN and not name.startswith(IGNORED)
    }
    return "; ".join([pairs(others)] * bool(others) + [f"ignored: {pairs(ignored)}"] * bool(ignored))


def _counted(count: float, noun: str) -> str:
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
