"""Checks whether a run can be resumed with a run file: which keys may have changed since the run was started."""

from __future__ import annotations

import tomllib
from pathlib import Path
from shlex import quote
from typing import Any

from rllm_core.config import RunConfig, to_toml
from rllm_core.errors import ConfigError
from rllm_core.file_references import section_name
from rllm_core.run_folder import checkpoint

RESUMABLE = frozenset(
    {
        ("training", "steps"),  # see `check_steps`
        ("training", "checkpoint_every_steps"),
        ("training", "keep_checkpoints"),
        ("training", "validate_every_steps"),
        ("training", "groups_kept_per_step"),
        ("training", "answers_table_every_steps"),
        ("training", "trajectories_per_step"),
        ("training", "trackers"),
        ("training", "buffer_max_bytes"),
        ("training", "buffer_spill"),
        ("training", "stall_timeout_seconds"),
        ("training", "backend_timeout_seconds"),
        ("training", "sync_timeout_seconds"),
        ("rollout", "rollout_timeout_seconds"),
        ("rollout", "max_attempts"),
        ("rollout", "request_timeout_seconds"),
        ("rollout", "max_request_attempts"),
        ("rollout", "max_consecutive_failures"),
        ("rollout", "max_failure_share"),
        ("rollout", "quarantine_after_groups"),
        ("rollout", "host"),
        ("rollout", "workers"),
        ("rollout", "rollouts_per_worker"),
        ("rollout", "replace_worker_after_rollouts"),
        ("rollout", "worker_memory_bytes"),
        ("rollout", "python"),
    }
)
"""Keys that may change on resume because nothing trained so far depends on them. So may all keys of ``[costs]``."""


def changed_keys(run_file: Path, config: RunConfig) -> list[str]:
    """Returns the keys that prevent a resume: they differ from the run's own run file, but must not change."""
    before = tomllib.loads(run_file.read_text(encoding="utf-8"))
    now = tomllib.loads(to_toml(config.to_tables()))
    changed = _changed_keys(before, now, ignored=_of_trackers(before, config) | {"costs"})
    return sorted(changed, key=lambda key: "." in key)  # another workflow or backend has other sections


def new_run(folder: Path) -> str:
    """Returns what a user can do where a run cannot be resumed; its weights are of use only if it has saved some."""
    if not checkpoint.complete(folder / "checkpoints"):
        return "start a new run in another folder"
    return f"start a new run from its weights: --init-from {quote(str(folder))} (in Python, setting training.init_from)"


def check_steps(run_file: Path, config: RunConfig, trained: int) -> None:
    """Checks that the new number of planned steps would not have changed the steps that a run has trained.

    Raises:
        ConfigError: If there are fewer planned steps than before, or a schedule depends on their number.
    """
    before = int(tomllib.loads(run_file.read_text(encoding="utf-8"))["training"]["steps"])
    now, optimizer, algorithm = config.training.steps, config.optimizer, config.algorithm
    if now < before:
        raise ConfigError(
            f"training.steps = {now} is less than the {before} planned steps of run folder {run_file.parent}, which "
            f"has done {trained}; resume with {before} or more"
        )
    last = algorithm.entropy_coefficient_final
    schedules = {
        f"optimizer.schedule = {optimizer.schedule!r}": optimizer.schedule != "constant",
        f"algorithm.entropy_coefficient_final = {last}": last not in (None, algorithm.entropy_coefficient),
    }
    for key, depends_on_steps in schedules.items():
        if now > before and depends_on_steps:
            raise ConfigError(
                f"training.steps cannot change from {before} to {now} in run folder {run_file.parent}: {key} depends "
                f"on the planned steps; {new_run(run_file.parent)}"
            )


def _of_trackers(before: dict[str, Any], config: RunConfig) -> frozenset[str]:
    """Returns the section names of old and new trackers, since trackers and their settings may change."""
    trackers = {*before.get("training", {}).get("trackers", ()), *config.training.trackers}
    return frozenset(trackers - {section_name(config.workflow), config.backend, config.parser})


def _changed_keys(
    before: dict[str, Any], now: dict[str, Any], path: tuple[str, ...] = (), *, ignored: frozenset[str] = frozenset()
) -> list[str]:
    changed = []
    for key in sorted((before.keys() | now.keys()) - ignored):
        old, new, here = before.get(key), now.get(key), (*path, key)
        if isinstance(old, dict) or isinstance(new, dict):
            changed += _changed_keys(old or {}, new or {}, here)
        elif old != new and here not in RESUMABLE:
            changed.append(".".join(here))
    return changed
