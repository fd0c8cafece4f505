"""Checks a run folder: its events first, then the other files against them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from rllm_core.config import TrainingConfig
from rllm_core.errors import ConfigError
from rllm_viewer.verify import comparisons
from rllm_viewer.verify.costs import check_costs
from rllm_viewer.verify.findings import Verification
from rllm_viewer.verify.groups import Groups
from rllm_viewer.verify.lines import Lines
from rllm_viewer.verify.replay import Replay
from rllm_viewer.verify.trajectories import Trajectories


def verify(run_dir: Path) -> Verification:
    """Checks a run folder.

    Raises:
        ConfigError: If the folder is not a run folder.
    """
    training, left_out = _run_file(run_dir)
    journal = run_dir / "events.jsonl"
    if not journal.is_file():
        raise ConfigError(
            f"{run_dir} has no events.jsonl to verify: no run was started in it, it was imported, or the file was lost"
        )
    found = Verification(planned_steps=training.steps)
    replay, events = Replay(training, left_out, found), Lines(journal.name)
    for number, line in events.raw(journal):
        replay.line(number, line, events.ends[-1])
    replay.ended()
    summary = comparisons.read_summary(run_dir, replay, found)
    if summary is not None:
        comparisons.check_summary(summary, replay, found)
        check_costs(run_dir, summary, found)
    trajectories = Trajectories(run_dir / "trajectories.jsonl", replay.blocks, found)
    comparisons.check_end_of_trajectories(run_dir, trajectories, found, is_killed=summary is None)
    comparisons.check_validations(replay, found)
    metrics = Lines.read(run_dir / "metrics.jsonl", found)
    timings = Lines.read(run_dir / "timings.jsonl", found)
    for lines in (metrics, timings):
        comparisons.check_step_lines(lines, run_dir, found)
    comparisons.check_metrics(metrics, replay.blocks, found)
    comparisons.check_timings(timings, metrics, found)
    groups = Groups(run_dir, replay.recorded.entries, found)
    comparisons.check_end_of_groups(run_dir, groups, found, is_killed=summary is None)
    comparisons.check_whole((events, trajectories.lines, groups.lines, groups.index, metrics, timings), found)
    files = (metrics, timings, trajectories.lines, groups.lines, groups.index)
    ends = {file.name.removesuffix(".jsonl"): file.ends for file in files}
    blocks = {"trajectories": trajectories.ends, "groups": groups.ends}
    comparisons.check_checkpoints(run_dir, replay, ends, blocks, found)
    return found


def _run_file(run_dir: Path) -> tuple[TrainingConfig, frozenset[str]]:
    """Reads ``[training]``, and the termination reasons that exclude rollouts from training."""
    try:
        tables: dict[str, Any] = tomllib.loads((run_dir / "run.toml").read_text(encoding="utf-8"))
        training = TrainingConfig.model_validate(tables.get("training", {}))
        return training, frozenset(tables.get("algorithm", {}).get("filter_termination_reasons", ()))
    except OSError as error:
        raise ConfigError(f"{run_dir} is not a run folder: {error.strerror} (run.toml)") from error
    except ValueError as error:
        raise ConfigError(f"{run_dir / 'run.toml'} cannot be read: {error}") from error
