"""The table of sampled answers that the terminal shows during a run."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console

from rllm_core.run_folder import answers_table
from rllm_core.run_folder.recorded import group_at, index_of
from rllm_core.tracker import Cell
from rllm_viewer.terminal import columns_of, cut, number

if TYPE_CHECKING:
    from rllm_core.events import TrainerState

COLUMNS = 80
TEXT_CHARACTERS = 120


def lines(state: TrainerState) -> list[str]:
    """Returns the table of the last step, if ``training.answers_table_every_steps`` asks for it."""
    if not answers_table.is_due(state.config.training.answers_table_every_steps, state.step):
        return []
    groups = [
        group_at(state.run_dir, entry)
        for entry in index_of(state.run_dir)
        if entry.step == state.step and entry.outcome == "trained"
    ]
    rows: list[list[str]] = []
    before: tuple[Cell, Cell] | None = None
    for task, question, expected, answer, reward in answers_table.rows(groups):
        asked = [_shown(question), _shown(expected)] if before != (task, question) else ["", ""]
        before = task, question
        rows.append([number(reward) if isinstance(reward, float | int) else "-", *asked, _shown(answer)])
    if not rows:
        return []
    screen = Console(width=COLUMNS, file=io.StringIO(), highlight=False, markup=False, emoji=False)
    with screen.capture() as captured:
        screen.print(columns_of(("reward", "question", "expected", "answer"), rows, right=[0]))
    return [f"answers of step {state.step}:", *(line.rstrip() for line in captured.get().splitlines())]


def _shown(cell: Cell) -> str:
    return "-" if cell is None else cut(str(cell), TEXT_CHARACTERS)
