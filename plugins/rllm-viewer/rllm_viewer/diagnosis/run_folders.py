"""Diagnoses a run from its folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rllm_core.run_folder.run import summary_of
from rllm_viewer.diagnosis import answers
from rllm_viewer.diagnosis.findings import Diagnosis
from rllm_viewer.results import metrics_of, tables_of, validations


def of_folder(run: Path) -> Diagnosis:
    """Returns the diagnosis of a run from its folder, finished or not.

    Raises:
        ConfigError: If the folder is not a run folder.
        OSError: If a file cannot be read.
        RunError: If a file is damaged.
        ValueError: If a line is damaged.
    """
    diagnosis = Diagnosis(tables_of(run), partial(answers.of_folder, run))
    summary = summary_of(run)
    for row in metrics_of(run):
        diagnosis.step(row)
    diagnosis.rollouts((summary or {}).get("books_by_reason") or {})
    if summary is not None:
        diagnosis.end([one.get("solved") for one in validations(run)])
    return diagnosis
