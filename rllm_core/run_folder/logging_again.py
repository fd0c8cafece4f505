"""Logs the last steps before a checkpoint again, because the trackers of a killed launch may have lost them."""

from __future__ import annotations

from rllm_core.run_folder import answers_table
from rllm_core.run_folder.folder import RunDir
from rllm_core.run_folder.journal import read_json_lines
from rllm_core.run_folder.recorded import group_at, index_of
from rllm_core.run_folder.results import ValidationResult
from rllm_core.run_folder.tracking import Trackers

STEPS = 100  # trackers write seconds later; W&B's offline files get blocks of about ten steps


def log_again(run_dir: RunDir, trackers: Trackers) -> None:
    """Logs the last `STEPS` steps before the checkpoint that a launch resumes, if the previous launch was killed."""
    if not run_dir.was_killed or run_dir.manifest is None:
        return
    metrics = read_json_lines(run_dir.path / "metrics.jsonl")[-STEPS:]
    timings = {line["step"]: line for line in read_json_lines(run_dir.path / "timings.jsonl")[-STEPS:]}
    validations = {one["step"]: ValidationResult(**one) for one in run_dir.manifest["validations"]}
    every = run_dir.config.training.answers_table_every_steps
    steps = [line["step"] for line in metrics]
    due = {step for step in steps if answers_table.is_due(every, step)}
    recorded = index_of(run_dir.path) if due else []
    entries = [entry for entry in recorded if entry.step in due and entry.outcome == "trained"]
    if steps[:1] == [1] and 0 in validations:
        trackers.log_validation(validations[0])
    for line in metrics:
        step = line["step"]
        trackers.log_step(line, timings.get(step, {}))
        if step in due:
            groups = [group_at(run_dir.path, entry) for entry in entries if entry.step == step]
            trackers.log_answers(step, groups)
        if step in validations:
            trackers.log_validation(validations[step])
