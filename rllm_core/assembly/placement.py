"""Chooses the rollout host of a run, according to the needs of its workflow."""

from __future__ import annotations

from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError
from rllm_core.providers import WorkflowProvider

INLINE = "inline"
WORKERS = "processes"
WORKER_KEYS = ("workers", "rollouts_per_worker", "replace_worker_after_rollouts", "worker_memory_bytes")
"""Keys of ``[rollout]`` that only shape workers; ``python`` also selects the workflow."""


def with_host(config: RunConfig, workflow: WorkflowProvider) -> RunConfig:
    """Fills in the rollout host that the workflow needs, or checks that the workflow can run in the chosen host.

    Raises:
        ConfigError: If the workflow cannot run in the chosen host.
    """
    rollout = config.rollout
    changes: dict[str, str | int] = {"host": rollout.host or (WORKERS if _worker_keys(config) else INLINE)}
    if workflow.blocks or workflow.global_state:
        what = "changes the state of its process" if workflow.global_state else "blocks its process"
        if rollout.host == INLINE:
            raise ConfigError(
                f"rollout.host = {INLINE!r} does not work with workflow {config.workflow!r}, which {what}; leave it "
                f"out, or choose {WORKERS!r}"
            )
        changes["host"] = rollout.host or WORKERS
    if workflow.global_state:
        if rollout.rollouts_per_worker not in (None, 1):
            raise ConfigError(
                f"rollout.rollouts_per_worker = {rollout.rollouts_per_worker} does not work with workflow "
                f"{config.workflow!r}, which changes the state of its process; leave it out: each of its rollouts gets "
                "a worker of its own"
            )
        changes["rollouts_per_worker"] = 1
    if changes["host"] == INLINE and (unused := _worker_keys(config)):
        raise ConfigError(
            f"{unused[0]} has no effect with rollout.host = {INLINE!r}, which has no workers; choose rollout.host = "
            f"{WORKERS!r}, or remove it"
        )
    return config.model_copy(update={"rollout": rollout.model_copy(update=changes)})


def _worker_keys(config: RunConfig) -> list[str]:
    """Returns the keys about workers that the run file sets."""
    return [f"rollout.{key}" for key in (*WORKER_KEYS, "python") if getattr(config.rollout, key)]


def host_notes(config: RunConfig, workflow: WorkflowProvider) -> list[str]:
    """Returns notes for ``--dry-run`` on the workflow's declarations about itself."""
    notes = []
    if workflow.global_state:
        notes.append(
            f"each rollout gets a worker of its own: workflow {config.workflow!r} changes the state of its process"
        )
    elif workflow.blocks:
        notes.append(f"rollouts run in workers: workflow {config.workflow!r} blocks its process")
    if workflow.waits_for_others:
        notes.append(
            f"metrics are not byte-identical between runs: rollouts of workflow {config.workflow!r} wait for others, "
            "so batches depend on timing"
        )
    return notes
