"""Draws the learning curves of ``judge.md`` from rows of ``benchmarks.judged``: ``make docs-reference``.

python docs/judged_curves.py bench/judged/raw.jsonl      # replaces the records by those of a measurement, and draws
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from diagrams import FOLDER, STYLE

RECORDS = FOLDER / "judged.json"
PICTURE = FOLDER / "judged.svg"
STEPS_PER_POINT = 10
NAMES = {
    "none": "the workflow's own rewards",
    "wrong": "a judge that is wrong for 15 % of the answers",
    "first": "a judge that prefers the first place",
    "first_twice": "the same judge, asked in both orders",
}
"""Judges in the picture, and what they are called there."""
KEPT = ("judge", "seed", "solved_after", "agreement", "order_effect")
WIDTH, HEIGHT = 640, 330
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 20, 120
_CURVES = """
    path.none { stroke: var(--edge); stroke-dasharray: 5 4 }
    path.wrong { stroke: #4a78d6 }
    path.first { stroke: #d6604a }
    path.first_twice { stroke: #3c9a5f }
    .curve { stroke-width: 1.8 }
    .grid { stroke: var(--box) }
    text { font-size: 16px }
"""


def records_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns what the page needs of the benchmark's rows; solve rates are means of some steps."""
    found = []
    for row in rows:
        if row["kind"] == "training":
            solved = row["solved"]
            points = [solved[at : at + STEPS_PER_POINT] for at in range(0, len(solved), STEPS_PER_POINT)]
            found.append({key: row[key] for key in KEPT} | {"solved": [round(fmean(point), 3) for point in points]})
    return sorted(found, key=lambda row: (row["judge"], row["seed"]))


def records() -> list[dict[str, Any]]:
    """Returns the recorded trials."""
    found: list[dict[str, Any]] = json.loads(RECORDS.read_text(encoding="utf-8"))
    return found


def svg(recorded: Sequence[Mapping[str, Any]]) -> str:
    """Returns the picture: a line for each judge, the mean over its seeds."""
    parts = [f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>']
    for rate in (0, 0.5, 1):
        parts.append(f'<path class="grid" d="M {LEFT} {_y(rate)} L {WIDTH - RIGHT} {_y(rate)}"/>')
        parts.append(f'<text class="faint" x="{LEFT - 8}" y="{_y(rate) + 4}" text-anchor="end">{rate:.0%}</text>')
    for place, (judge, name) in enumerate(NAMES.items()):
        runs = [row for row in recorded if row["judge"] == judge]
        means = [fmean(point) for point in zip(*(row["solved"] for row in runs), strict=True)]
        points = " L ".join(f"{_x((number + 0.5) / len(means))} {_y(rate)}" for number, rate in enumerate(means))
        parts.append(f'<path class="curve {judge}" d="M {points}"/>')
        line = HEIGHT - BOTTOM + 42 + 22 * place
        parts.append(f'<path class="curve {judge}" d="M {LEFT} {line - 5} L {LEFT + 34} {line - 5}"/>')
        seeds = f"{len(runs)} seed" + "s" * (len(runs) != 1)
        parts.append(f'<text x="{LEFT + 44}" y="{line}">{name}, {seeds}</text>')
    steps = max(len(row["solved"]) for row in recorded) * STEPS_PER_POINT
    words = f"solve rate over {steps} steps"
    parts.append(f'<text class="faint" x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM + 20}" text-anchor="end">{words}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    title = "<title>Solve rates of sort, with rewards of the workflow and of scripted judges</title>"
    return "\n".join([head, title, f"<style>{STYLE}{_CURVES}</style>", *parts, "</svg>", ""])


def _x(share: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * share, 1)


def _y(rate: float) -> float:
    return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * rate, 1)


def draw() -> None:
    """Writes the picture."""
    PICTURE.write_text(svg(records()), encoding="utf-8")


def main(file: Path) -> None:
    """Replaces the records by those of a measurement, and draws them."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in records_of(rows))
    RECORDS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    draw()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
