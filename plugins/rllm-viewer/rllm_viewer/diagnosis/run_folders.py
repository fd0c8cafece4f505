"""Diagnoses a run from its folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rllm_core.run_folder.journal import read_json_lines
from rllm_core.text import counted
from rllm_viewer.diagnosis import answers
from rllm_viewer.diagnosis.findings import Diagnosis
from rllm_viewer.results import summary_of, tables_of, validations


def of_folder(run: Path) -> Diagnosis:
    """Returns the diagnosis of a run from its folder, finished or not.

    Raises:
        ConfigError: If the folder is not a run folder.
        OSError: If a file cannot be read.
        ValueError: If a file is damaged.
    """
    diagnosis = Diagnosis(tables_of(run), partial(answers.of_folder, run))
    rows, summary = read_json_lines(run / "metrics.jsonl"), summary_of(run)
    # A run may fail between its last step and the row of that step.
    trained = 0 if summary is None else summary.get("optimizer_steps", 0)
    if len(rows) < trained - (summary is not None and summary["status"] == "failed"):
        raise ValueError(f"metrics.jsonl has {len(rows)} of {counted(trained, 'step')}")
    for row in rows:
        diagnosis.step(row)
    diagnosis.rollouts((summary or {}).get("books_by_reason") or {})
    if summary is not None:
        diagnosis.end([one.get("solved") for one in validations(run)])
    return diagnosis
