"""Warnings during a run: each problem is reported once when it is certain, and once when it is over."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rllm_core.run_folder.journal import read_json_lines
from rllm_viewer.diagnosis import Diagnosis, answers

if TYPE_CHECKING:
    from rllm_core.events import TrainerState

COLUMNS = 80


class _Followed:
    """A run in this process, and its reported problems."""

    def __init__(self, state: TrainerState) -> None:
        self.diagnosis = Diagnosis(state.config.to_tables(), partial(answers.of_folder, state.run_dir))
        self.named: set[str] = set()
        if state.step:  # a resumed run keeps its earlier problems
            for row in read_json_lines(state.run_dir / "metrics.jsonl"):
                self.diagnosis.step(row)


_followed: dict[Path, _Followed] = {}


def lines(state: TrainerState, metrics: Mapping[str, float], books: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns the lines to print about a run now; see hook ``remarks``."""
    run = _followed.get(state.run_dir)
    if run is None or not metrics:
        run = _followed[state.run_dir] = _Followed(state)
    if metrics:
        run.diagnosis.step(metrics)
    run.diagnosis.rollouts(books)
    found = {finding.name: finding for finding in run.diagnosis.findings}
    said = []
    for name, finding in found.items():
        if name not in run.named:
            said += wrapped(f"warning: {finding.text(state.run_dir)}")
    said += [f"no longer: {name.replace('-', ' ')} (step {state.step})" for name in run.named if name not in found]
    run.named = set(found)
    if state.step >= state.config.training.steps:
        del _followed[state.run_dir]
    return said


def wrapped(text: str) -> list[str]:
    """Wraps a text to at most 80 columns without breaking words, such as paths and commands."""
    return textwrap.wrap(text, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
