"""``rllm-core runs``: lists the runs in a folder, each with its result."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rllm_viewer.results import RunResult

HEADERS = ("NAME", "WORKFLOW", "STATUS", "STEPS", "RESULT", "TOKENS", "COST", "AGE")
RIGHT = ("STEPS", "TOKENS", "COST", "AGE")
MIN_CURVE_COLUMNS = 8
MAX_CURVE_COLUMNS = 24
GAP = 2
SHOWN_ERRORS = 5


@click.command("runs", short_help="List the runs in a folder, each with its result.")
@click.argument("folder", metavar="[FOLDER]", type=click.Path(path_type=Path), default=Path("runs"))
@click.option("--json", "as_json", is_flag=True, help="Print a list of JSON objects.")
def runs(folder: Path, as_json: bool) -> None:
    """List the runs in a folder, each with its result.

    FOLDER defaults to ./runs. The run that changed last comes last. RESULT is the solve rate in percent, or else the
    mean reward or the loss: at the first and the last validation, or of training steps while there is no summary.
    TOKENS counts tokens to and from models; COST is their cost by the prices of the run file. A wide terminal also
    shows the curve over the training steps. AGE is the time since the run last wrote a file.
    """
    from rllm_viewer.results import result_of, run_folders

    found = sorted(map(result_of, run_folders(folder)), key=lambda result: (result.changed or 0.0, result.path))
    if as_json:
        click.echo(json.dumps([_json(result) for result in found], indent=2))
    elif found:
        _print(found)
    else:
        click.echo(f"no runs in {folder}")


def _print(found: Sequence[RunResult]) -> None:
    from rich.cells import cell_len
    from rich.text import Text

    from rllm_viewer.terminal import console, fitted, sparkline, visible_line

    screen = console()
    now = time.time()
    rows = [[visible_line(cell) for cell in _row(result, now)] for result in found]
    widths = {name: max(cell_len(line[at]) for line in (HEADERS, *rows)) for at, name in enumerate(HEADERS)}
    shown = list(HEADERS)
    for name, amounts in (("TOKENS", [run.tokens for run in found]), ("COST", [run.money for run in found])):
        if all(amount is None for amount in amounts):
            shown.remove(name)
    for name in ("WORKFLOW", "AGE", "TOKENS"):  # columns that a narrow terminal drops, in this order
        if name in shown and _total(widths, shown) > screen.width:
            shown.remove(name)
    widths["NAME"] -= max(0, _total(widths, shown) - screen.width)
    left = screen.width - _total(widths, shown) - GAP
    has_curve = left >= MIN_CURVE_COLUMNS and any(len(result.curve) > 1 for result in found)
    lines = [list(HEADERS), *rows]
    for number, line in enumerate(lines):
        cells = [_aligned(fitted(line[HEADERS.index(name)], widths[name]), widths[name], name) for name in shown]
        if has_curve:
            cells.append(sparkline(_thinned(found[number - 1].curve, left)) if number else "CURVE")
        text = (" " * GAP).join(cells).rstrip()
        screen.print(Text(text, style="bold" if number == 0 else "", no_wrap=True, overflow="crop"))
    for result in [result for result in found if result.error is not None][-SHOWN_ERRORS:]:
        why = visible_line(f"{result.path.name} ({result.status}): {result.error}")
        screen.print(Text(why))


def _row(result: RunResult, now: float) -> tuple[str, ...]:
    planned = "" if result.planned_steps is None else f"/{result.planned_steps}"
    return (
        result.path.name or str(result.path.resolve().name),
        f"{result.workflow or ''} ({result.backend})" if result.backend else result.workflow or "",
        result.status,
        "" if result.steps is None else f"{result.steps}{planned}",
        _measured(result),
        "" if result.tokens is None else short(result.tokens),
        "" if result.money is None else f"{result.money:.4g}",
        "" if result.changed is None else _age(now - result.changed),
    )


def short(amount: float) -> str:
    """Formats a large number with three digits."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if amount >= size:
            return f"{amount / size:.3g}{unit}"
    return f"{amount:.0f}"


def _measured(result: RunResult) -> str:
    from rllm_viewer.terminal import number, share

    if result.measure is None:
        return ""
    form = share if result.measure == "solved" else number
    name = {"solved": "", "reward_mean": ""}.get(result.measure, "loss ")
    return f"{name}{form(result.first)} -> {form(result.last)}"


def _age(seconds: float) -> str:
    """Formats a duration in its largest unit."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"


def _total(widths: dict[str, int], shown: Sequence[str]) -> int:
    return sum(widths[name] for name in shown) + GAP * (len(shown) - 1)


def _aligned(text: str, width: int, name: str) -> str:
    from rich.cells import cell_len

    space = " " * (width - cell_len(text))
    return space + text if name in RIGHT else text + space


def _thinned(curve: Sequence[float | None], columns: int) -> list[float | None]:
    """Returns evenly spaced values, including the first and the last."""
    wanted = min(columns, MAX_CURVE_COLUMNS)
    if len(curve) <= wanted:
        return list(curve)
    return [curve[number * (len(curve) - 1) // (wanted - 1)] for number in range(wanted)]


def _json(result: RunResult) -> dict[str, Any]:
    times = {
        name: None if value is None else datetime.fromtimestamp(value, UTC).isoformat(timespec="seconds")
        for name, value in (("started", result.started), ("changed", result.changed))
    }
    found = asdict(result) | {"path": str(result.path), "curve": list(result.curve)} | times
    # Files of others, and damaged ones, may have NaN, which is not JSON.
    cleaned: dict[str, Any] = json.loads(json.dumps(found), parse_constant=lambda _: None)
    return cleaned
