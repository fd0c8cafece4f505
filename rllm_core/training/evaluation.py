"""Evaluation: a model or a checkpoint on a workflow, without training."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rllm_core.backend import PolicyUpdate
from rllm_core.errors import ConfigError, RunError
from rllm_core.observers import Observers
from rllm_core.training import checkpoint
from rllm_core.training.launch import Assembly
from rllm_core.training.rollouts import RolloutRunner
from rllm_core.training.tasks import spread
from rllm_core.training.validation import play_all

BOOTSTRAP_RESAMPLES = 2000


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The unbiased estimate ``1 - C(n - c, k) / C(n, k)`` (arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the mean over tasks."""
    array = np.asarray(values, np.float64)
    picks = np.random.default_rng(seed).integers(0, len(array), (BOOTSTRAP_RESAMPLES, len(array)))
    low, high = np.quantile(array[picks].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


async def evaluate(
    assembly: Assembly,
    *,
    split: str,
    task_limit: int | None,
    samples: int,
    ks: Sequence[int],
    checkpoint_dir: Path | None,
) -> dict[str, Any]:
    """Play ``samples`` rollouts of every task.

    Returns:
        JSON: ``workflow, split, tasks, rollouts_per_task, failed, reward_mean, pass_at_k``; the last a list of
        ``{k, value, low, high}`` over the tasks with at least k rollouts that ended well.

    Raises:
        ConfigError: If there are no tasks, or the checkpoint does not exist.
        RunError: If not one rollout ended well, or the checkpoint is damaged.
    """
    name: Literal["train", "validation"] = "train" if split == "train" else "validation"
    tasks = assembly.workflow.tasks(name)
    if not tasks:
        raise ConfigError(f"workflow {assembly.config.workflow!r} has no {split} tasks")
    chosen = [task for task, _ in spread(tasks, min(task_limit or len(tasks), len(tasks)))]
    manifest = checkpoint.read(_checkpoint(checkpoint_dir)) if checkpoint_dir is not None else None
    backend = assembly.backend
    try:
        engine = await assembly.engine()
        version, step = 0, 0
        if manifest is not None and checkpoint_dir is not None:
            backend.load_state_dict(manifest["backend"])
            await backend.load_checkpoint(_checkpoint(checkpoint_dir) / "backend")
            version, step = manifest["coordinator"]["weight_version"], manifest["step"]
        await backend.on_policy_updated(PolicyUpdate(version, step, "resume" if manifest else "start"))
        capabilities = type(backend).capabilities(assembly.config)
        if capabilities.colocated:
            await backend.enter_generation()
        runner = RolloutRunner(
            assembly.workflow,
            engine,
            assembly.config,
            Observers(assembly.plugins),
            lockstep=capabilities.colocated and capabilities.deterministic,
        )
        episodes = await play_all(runner, spread(chosen, len(chosen) * samples), "eval")
        await runner.aclose()
    finally:
        await backend.shutdown()
    finished = [episode for episode in episodes if episode.trajectories]
    if not finished:
        raise RunError(f"all {len(episodes)} rollouts failed, the first with: {episodes[0].error}")
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for episode in finished:
        if episode.is_correct is not None:
            outcomes[episode.task_id].append(episode.is_correct)
    scores = []
    for k in ks:
        values = [pass_at_k(len(flags), sum(flags), k) for flags in outcomes.values() if len(flags) >= k]
        if values:
            low, high = interval(values)
            scores.append({"k": k, "value": float(np.mean(values)), "low": low, "high": high})
    return {
        "workflow": assembly.config.workflow,
        "split": split,
        "tasks": len(chosen),
        "rollouts_per_task": samples,
        "failed": len(episodes) - len(finished),
        "reward_mean": float(np.mean([sum(t.total_reward for t in e.trajectories if t.trainable) for e in finished])),
        "pass_at_k": scores,
    }


def _checkpoint(path: Path) -> Path:
    """The checkpoint folder meant by ``path``: itself, or the newest one of the run folder it is."""
    if (path / checkpoint.MANIFEST).is_file():
        return path
    found = checkpoint.complete(path / "checkpoints")
    if not found:
        raise ConfigError(f"{path} is neither a complete checkpoint nor a run folder with one")
    return found[-1]
