"""Compares the costs in ``summary.json`` with the sums over ``costs.jsonl``."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from rllm_viewer.verify.findings import Verification
from rllm_viewer.verify.lines import Lines

ROUNDING_SECONDS = 1e-6  # per line


def check_costs(run_dir: Path, summary: dict[str, Any], found: Verification) -> None:
    """Checks the costs of all launches, including lines that a resume moved away, because they were paid as well."""
    if "costs" not in summary:
        return  # written by an earlier version
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    lines = 1
    for path in (run_dir / "costs.jsonl", *sorted(run_dir.glob("lost/*/costs.jsonl"))):
        for number, line in Lines(path.name).raw(path):
            lines += 1
            try:
                for kind, amounts in json.loads(line)["costs"].items():
                    sums[kind].update(amounts)
            except (ValueError, LookupError, TypeError, AttributeError):
                found.problem(f"{path.relative_to(run_dir)} line {number} cannot be read")
    try:
        said: dict[str, dict[str, Any]] = summary["costs"]["by_kind"]
        for kind in sorted(said.keys() | sums.keys()):
            for name in ("calls", "unmetered", "prompt_tokens", "completion_tokens", "seconds"):
                written, counted = said.get(kind, {}).get(name, 0), sums[kind][name]
                if abs(written - counted) > (ROUNDING_SECONDS * lines if name == "seconds" else 0):
                    found.problem(
                        f"summary.json has costs.by_kind.{kind}.{name} {written}, expected {counted} from costs.jsonl"
                    )
    except (LookupError, TypeError, AttributeError) as error:
        found.problem(f"summary.json cannot be read: {type(error).__name__}: {error}")
