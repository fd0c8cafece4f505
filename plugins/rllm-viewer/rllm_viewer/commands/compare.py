"""``rllm-core compare``: compares the settings, validations and metrics of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from rllm_viewer.comparing import ComparedRun

SHOWN_STEPS = 12
VALUE_CHARACTERS = 60
ABSENT = "-"
# Metrics of the last step to show; --json has all of them.
SHOWN_METRICS = (
    "step",
    "reward_mean",
    "solved",
    "loss",
    "sampled_entropy",
    "grad_norm",
    "groups_solved_by_none",
    "groups_solved_by_all",
    "response_tokens_mean",
    "turns_mean",
    "truncated_share",
    "staleness_mean",
    "segment_breaks",
)


@click.command("compare", short_help="Compare runs: differing settings, validations, last metrics, plot.")
@click.argument("runs", metavar="RUN RUN...", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path), help="Draw all curves to a new file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare(runs: tuple[Path, ...], plot: Path | None, as_json: bool) -> None:
    """Compare runs: differing settings and versions, validations, metrics of the last step.

    Each RUN is a run folder. Settings that are the same in all runs are left out. --plot draws the rewards, or else
    the losses, over the steps; the ending of FILE, such as .png or .svg, is the format.
    """
    from rllm_viewer import comparing
    from rllm_viewer.terminal import visible

    if len(runs) < 2:
        raise click.UsageError("compare needs at least two run folders")
    found = [comparing.read(run) for run in runs]
    if plot is not None:
        comparing.plot(found, [f"{_letter(at)}: {visible(str(run))}" for at, run in enumerate(runs)], plot)
    if as_json:
        click.echo(json.dumps(_json(found, plot)))
        return
    _print(found)
    if plot is not None:
        click.echo(f"plot: {plot}")


def _print(runs: Sequence[ComparedRun]) -> None:
    from rich.text import Text

    from rllm_viewer import comparing, results
    from rllm_viewer.terminal import console, number, share, sparkline, value_text, visible

    screen = console()
    letters = [_letter(position) for position in range(len(runs))]
    for letter, run in zip(letters, runs, strict=True):
        screen.print(Text(visible(f"{letter}: {run.path}")))
    for title, values in (
        ("settings", comparing.differing([run.settings for run in runs])),
        ("versions", comparing.differing([run.versions for run in runs])),
    ):
        rows = {name: [ABSENT if v is None else value_text(v) for v in of_runs] for name, of_runs in values.items()}
        _section(screen, f"{title} that differ", letters, rows, empty=f"{title}: the same")
    for measure in results.VALIDATION_MEASURES:
        by_step = comparing.by_step(runs, measure)
        if by_step:
            form = share if measure == "solved" else number
            kept = _thinned(list(by_step))
            title = f"validation {measure}" + (
                f", {len(kept)} of {len(by_step)} steps" if len(kept) < len(by_step) else ""
            )
            rows = {f"step {step}": [form(value) for value in by_step[step]] for step in kept}
            _section(screen, title, letters, rows)
    if not any(run.validations for run in runs):
        screen.print("\nno validation has ended")
    last = comparing.last_metrics(runs)
    names = [
        *(name for name in SHOWN_METRICS if name in last),
        *(name for name in last if name.startswith("workflow/")),
    ]
    _section(screen, "last training step", letters, {name: [number(v) for v in last[name]] for name in names})
    if (curve := comparing.curve_of(runs)) is not None:
        screen.print(f"\n{curve} over the steps, from first to last, in the same scale", style="bold")
        known = [row[curve] for run in runs for row in run.metrics if row.get(curve) is not None]
        most = max(len(run.metrics) for run in runs)
        for letter, run in zip(letters, runs, strict=True):
            columns = max(1, round(min(screen.width - 4, 60) * len(run.metrics) / most))
            drawn = _means([row.get(curve) for row in run.metrics], columns)
            screen.print(Text(f"{letter}  {sparkline(drawn, min(known), max(known))}"))


def _section(
    screen: Console, title: str, letters: Sequence[str], rows: Mapping[str, Sequence[str]], empty: str = ""
) -> None:
    """Prints the runs' values by name: in columns, or one below the other if columns would be too wide."""
    from rich.cells import cell_len
    from rich.text import Text

    from rllm_viewer.terminal import columns_of, cut, labeled, visible_line

    if not rows:
        if empty:
            screen.print(f"\n{empty}")
        return
    screen.print(Text(f"\n{title}", style="bold"))
    clean = [[visible_line(cell) for cell in (name, *values)] for name, values in rows.items()]
    lines = [["", *letters], *clean]
    widths = [max(cell_len(line[at]) for line in lines) for at in range(len(lines[0]))]
    if sum(widths) + 2 * (len(widths) - 1) <= screen.width:
        screen.print(columns_of(("", *letters), clean, right=range(1, len(letters) + 1)))
        return
    for name, *values in clean:
        screen.print(Text(name, overflow="fold"))
        for letter, value in zip(letters, values, strict=True):
            screen.print(labeled(letter, cut(value, 10 * VALUE_CHARACTERS)))


def _letter(position: int) -> str:
    """Returns A to Z, then A1 and so on."""
    return chr(65 + position % 26) + (str(position // 26) if position >= 26 else "")


def _thinned(steps: Sequence[int]) -> list[int]:
    """Returns evenly spaced steps, including the first and the last."""
    if len(steps) <= SHOWN_STEPS:
        return list(steps)
    return [steps[number * (len(steps) - 1) // (SHOWN_STEPS - 1)] for number in range(SHOWN_STEPS)]


def _means(values: Sequence[float | None], columns: int) -> list[float | None]:
    """Splits the values into ``columns`` parts and returns the mean of each; None for a part without values."""
    columns = min(columns, len(values))
    means: list[float | None] = []
    for number in range(columns):
        part = values[number * len(values) // columns : (number + 1) * len(values) // columns]
        known = [value for value in part if value is not None]
        means.append(sum(known) / len(known) if known else None)
    return means


def _json(runs: Sequence[ComparedRun], plot: Path | None) -> dict[str, Any]:
    from rllm_viewer import comparing, results

    measures = {measure: comparing.by_step(runs, measure) for measure in results.VALIDATION_MEASURES}
    return {
        "runs": [str(run.path) for run in runs],
        "settings": comparing.differing([run.settings for run in runs]),
        "versions": comparing.differing([run.versions for run in runs]),
        "validations": {
            name: {str(step): row for step, row in rows.items()} for name, rows in measures.items() if rows
        },
        "metrics": comparing.last_metrics(runs),
        "plot": None if plot is None else str(plot),
    }
