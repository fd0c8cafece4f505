"""``rllm-core export``: writes recorded rollouts for training, or in the formats of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

FORMATS = ("sft", "openai", "hf", "atif", "verifiers", "inspect")


@click.command("export", short_help="Export recorded rollouts for training, or in the formats of other tools.")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--to", "kind", type=click.Choice(FORMATS), required=True, help="Format of the output.")
@click.option("--best", is_flag=True, help="Only the rollout of each group with the highest reward.")
@click.option("--solved", is_flag=True, help="Only rollouts that solved their task.")
@click.option("--reward-above", type=float, metavar="X", help="Only rollouts with a higher reward.")
@click.option("--steps", metavar="A-B", help="Only groups of these steps, such as 40, 40-60 or 40-.")
@click.option("--task", metavar="ID", help="Only groups of this task.")
@click.option("--split", type=click.Choice(("training", "validation")), help="Only groups of this split.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export(
    run: Path,
    out: Path,
    kind: str,
    best: bool,
    solved: bool,
    reward_above: float | None,
    steps: str | None,
    task: str | None,
    split: Any,
    as_json: bool,
) -> None:
    """Export recorded rollouts for training, or in the formats of other tools.

    RUN is the folder of a finished or a running run, whose recorded groups are exported. OUT is a new file that ends in
    .jsonl, .parquet or .json. For sft and hf it may also be a new folder, which gets a file per split. Data that the
    format cannot hold is left out; the command prints what was left out, and how often.
    """
    from rllm_viewer.travel.exports import export as exported
    from rllm_viewer.travel.formats import FORMATS as formats
    from rllm_viewer.travel.selection import Filters, steps_of

    chosen = Filters(
        best=best,
        solved=solved,
        reward_above=reward_above,
        steps=(None, None) if steps is None else steps_of(steps),
        task=task,
        split=split,
    )
    found = exported(run, out, formats[kind], chosen)
    if as_json:
        click.echo(json.dumps(found))
        return
    from rllm_core.text import counted

    rollouts, groups = counted(found["rollouts"], "rollout"), counted(found["groups"], "group")
    print_lines(
        *([found["state"]] if found["state"] is not None else []),
        *(f"{counted(rows, 'row')}: {path}" for path, rows in found["files"].items()),
        f"of {rollouts} in {groups}",
        *lost_lines(found["lost"], f"left out, because format {kind} cannot hold it:"),
    )


def lost_lines(lost: dict[str, int], heading: str) -> list[str]:
    """Returns lines that count the data left out, by kind; empty if there is none."""
    return [heading, *(f"{count:>9,}  {name}" for name, count in lost.items())] if lost else []


def print_lines(*lines: str) -> None:
    """Prints lines, wrapped to the width of the terminal."""
    from rich.text import Text

    from rllm_viewer.terminal import console, visible_line

    screen = console()
    for line in lines:
        screen.print(Text(visible_line(line), overflow="fold"))
