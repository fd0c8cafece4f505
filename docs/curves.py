"""Draws the learning curves of ``recipes.md`` from recorded runs: ``make docs-reference``.

``make curves`` runs the commands again and replaces the records.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from diagrams import FOLDER, STYLE

RECORDS = FOLDER / "curves.json"
COMMANDS = {
    "sort": "rllm-core train sort --backend local",
    "guess": "rllm-core train guess --backend local",
    "calculator": "rllm-core train calculator --backend local",
    "lora": "rllm-core train sort --backend local -o local.lora.rank=8",
}
WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 20, 36
_CURVE = """
    .curve { stroke: #4a78d6; stroke-width: 1.8 }
    .held { fill: #d6604a }
    .grid { stroke: var(--box) }
    text { font-size: 17px }
    .faint { font-size: 16px }
"""


def record(run: Path) -> dict[str, Any]:
    """Returns the solve rates of a run: one per step, and ``[step, rate]`` per validation."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return {
        "solved": [round(json.loads(line)["solved"], 3) for line in lines],
        "validation": [[row["step"], round(row["solved"], 3)] for row in summary["validation"]],
    }


def svg(name: str, recorded: dict[str, Any]) -> str:
    """Returns the picture of a recorded run: a line for training, points for held-out tasks."""
    solved, held = recorded["solved"], recorded["validation"]

    def x(step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / len(solved), 1)

    def y(rate: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * rate, 1)

    parts = [f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>']
    for rate in (0, 0.5, 1):
        parts.append(f'<path class="grid" d="M {LEFT} {y(rate)} L {WIDTH - RIGHT} {y(rate)}"/>')
        parts.append(f'<text class="faint" x="{LEFT - 8}" y="{y(rate) + 4}" text-anchor="end">{rate:.0%}</text>')
    points = " L ".join(f"{x(step)} {y(rate)}" for step, rate in enumerate(solved, 1))
    parts.append(f'<path class="curve" d="M {points}"/>')
    for step, rate in held:
        parts.append(f'<circle class="held" cx="{x(step)}" cy="{y(rate)}" r="4.5"/>')
        end = step > len(solved) / 2
        beside = f'x="{x(step) - 8 if end else x(step) + 10}" y="{y(rate) + (24 if end else 4)}"'
        parts.append(f'<text {beside} text-anchor="{"end" if end else "start"}">{rate:.1%}</text>')
    title = f"Solve rate of {COMMANDS[name]}"
    words = f"solve rate over {len(solved)} steps: line, training; points, held-out tasks"
    parts.append(f'<text class="faint" x="{LEFT}" y="{HEIGHT - 10}" text-anchor="start">{words}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{STYLE}{_CURVE}</style>", *parts, "</svg>", ""])


def records() -> dict[str, dict[str, Any]]:
    """Returns the recorded runs by name."""
    found: dict[str, dict[str, Any]] = json.loads(RECORDS.read_text(encoding="utf-8"))
    return found


def draw() -> None:
    """Writes the picture of every recorded run."""
    for name, recorded in records().items():
        (FOLDER / f"curve-{name}.svg").write_text(svg(name, recorded), encoding="utf-8")


def measure() -> None:
    """Runs the commands and replaces the records; takes minutes."""
    found = {}
    program = Path(sys.executable).with_name("rllm-core")
    with tempfile.TemporaryDirectory() as folder:
        for name, command in COMMANDS.items():
            run = Path(folder, name)
            subprocess.run([program, *shlex.split(command)[1:], "--run-dir", run], check=True)
            found[name] = record(run)
    write(found)


def write(found: dict[str, dict[str, Any]]) -> None:
    """Replaces the records."""
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(recorded)}" for name, recorded in found.items())
    RECORDS.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    measure()
    draw()
