"""Evaluation of a model or checkpoint on a workflow, without training."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rllm_core.assembly.algorithm import Algorithm
from rllm_core.assembly.engines import build_parser, open_engine
from rllm_core.assembly.parts import Parts
from rllm_core.assembly.resolution import Resolved
from rllm_core.assembly.scorer import asks_start, open_scorer_engine, scorer_of
from rllm_core.assembly.tasks import Tasks, spread
from rllm_core.backend import BackendProtocol, PolicyUpdate
from rllm_core.engine import RolloutEngine
from rllm_core.errors import ConfigError, RunError
from rllm_core.hosts.contract import RolloutHost
from rllm_core.limits.backend_timeouts import with_timeouts
from rllm_core.limits.blocking_calls import noting_blocking_calls
from rllm_core.limits.timeouts import close_within
from rllm_core.run_folder import checkpoint
from rllm_core.run_folder.first_failures import FirstFailures
from rllm_core.run_folder.initial import checked as initial_weights
from rllm_core.run_folder.results import metric_means
from rllm_core.runs import launch
from rllm_core.training.rollouts import Rollout, RolloutRunner
from rllm_core.training.scoring import Scoring
from rllm_core.training.validation import play_all
from rllm_core.workflow import ENDLESS, Split

BOOTSTRAP_RESAMPLES = 2000

logger = logging.getLogger(__name__)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Computes the unbiased estimate ``1 - C(n - c, k) / C(n, k)`` (arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Computes the 95 % bootstrap interval of the mean over tasks.

    If all values are 0, or all are 1, all resamples have the same mean, which says nothing about other tasks. One end
    is then the exact limit for a share of tasks (Clopper and Pearson, Biometrika 26, 1934).
    """
    array = np.asarray(values, np.float64)
    if array.mean() in (0.0, 1.0):
        missed = float(1 - 0.025 ** (1 / len(array)))
        return (1 - missed, 1.0) if array.any() else (0.0, missed)
    picks = np.random.default_rng(0).integers(0, len(array), (BOOTSTRAP_RESAMPLES, len(array)))
    low, high = np.quantile(array[picks].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True)
class OpenEngine:
    """An engine ready to sample.

    Attributes:
        lockstep: Whether its results depend on the rest of the batch (see `RequestMerger`).
    """

    engine: RolloutEngine
    lockstep: bool
    backend: BackendProtocol[Any] | None = None


@asynccontextmanager
async def engine_of_backend(assembly: Parts, checkpoint_dir: Path | None) -> AsyncIterator[OpenEngine]:
    """Opens the engine of the run's backend, with the weights of a checkpoint or the run's initial weights.

    Raises:
        ConfigError: If the checkpoint does not exist, or the initial weights do not fit the run.
        RunError: If the checkpoint is damaged.
    """
    config, backend = assembly.config, with_timeouts(assembly.backend, assembly.config)
    capabilities = backend.capabilities(config)
    folder = _checkpoint(checkpoint_dir) if checkpoint_dir is not None else None
    manifest = checkpoint.read(folder) if folder is not None else None
    initial = initial_weights(config) if folder is None or asks_start(assembly.scorer) else None
    try:
        engine = await assembly.engine()
        update = PolicyUpdate(0, 0, "start")
        if initial is not None:
            await backend.load_weights(initial.folder / "backend")
        if folder is not None and manifest is not None:
            backend.load_state_dict(manifest["backend"])
            await backend.load_checkpoint(folder / "backend")
            update = PolicyUpdate(manifest["coordinator"]["weight_version"], manifest["step"], "resume")
        await backend.on_policy_updated(update)
        if capabilities.colocated:
            await backend.enter_generation()
        yield OpenEngine(engine, capabilities.colocated and capabilities.deterministic, backend)
    finally:
        what = f"shutdown of backend {config.backend!r}"
        await close_within(launch.SHUTDOWN_TIMEOUT_SECONDS, what, assembly.backend.shutdown, logger.warning)


@asynccontextmanager
async def engine_by_name(name: str, resolved: Resolved) -> AsyncIterator[OpenEngine]:
    """Opens a standalone engine for the model and parser of the run file."""
    parser = build_parser(resolved, resolved.config.parser, resolved.config.model.path)
    async with open_engine(resolved, name, parser, f"engine {name!r}") as engine:
        yield OpenEngine(engine, lockstep=False)


class _Runner(RolloutRunner):
    """Keeps the rollouts that have finished, for an evaluation that is cancelled."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.finished: list[Rollout] = []

    async def run(self, *arguments: Any, **options: Any) -> Rollout:
        """See `RolloutRunner.run`."""
        rollout = await super().run(*arguments, **options)
        self.finished.append(rollout)
        return rollout


async def evaluate(
    resolved: Resolved,
    host: RolloutHost,
    opening: AbstractAsyncContextManager[OpenEngine],
    *,
    split: Split,
    task_limit: int | None,
    samples: int,
    ks: Sequence[int],
    measured: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Runs ``samples`` rollouts of every task.

    Calls ``measured`` with the result before the engine shuts down. If the evaluation is cancelled earlier, calls it
    with the result over the rollouts that had finished, unless none had succeeded, or a group scorer would have to
    score them.

    Returns:
        JSON: ``workflow, split, tasks, rollouts_per_task, unfinished, failed, retries, reward_mean, pass_at_k, metrics,
        failures``. ``unfinished`` is the number of rollouts that an interruption cancelled. ``reward_mean`` is None
        without rewards. ``pass_at_k`` is a list of ``{k, value, low, high, tasks}`` over the tasks with at least k
        successful rollouts, whose number is ``tasks``. ``failures`` has the first failure of every kind
        (`rllm_core.run_folder.first_failures`).

    Raises:
        ConfigError: If there are no tasks.
        RunError: If every rollout failed.
    """
    config, workflow = resolved.config, host.hosted.workflow
    if not workflow.samples:
        raise ConfigError(
            f"workflow {config.workflow!r} never calls the model, so there is nothing to evaluate; validations of "
            "rllm-core train report the likelihood of its example conversations. To measure what the model learned, "
            "name another workflow: rllm-core eval WORKFLOW --checkpoint RUN"
        )
    tasks = Tasks(workflow, config.workflow).of(split)
    if not len(tasks):
        raise ConfigError(f"workflow {config.workflow!r} has no {split} tasks; choose the other split")
    if len(tasks) == ENDLESS and task_limit is None:
        raise ConfigError(
            f"workflow {config.workflow!r} has endless {split} tasks; limit them with --tasks N (in Python, tasks=N)"
        )
    estimators, scorer = Algorithm.of(resolved).estimators, scorer_of(resolved)
    chosen = [task for task, _ in spread(tasks, min(task_limit or len(tasks), len(tasks)))]
    async with opening as opened:
        lockstep = opened.lockstep and not resolved.workflow.record.waits_for_others
        runner = _Runner(host, opened.engine, config, lockstep=lockstep, estimators=estimators)
        plan, failures = spread(chosen, len(chosen) * samples), FirstFailures()
        about = {"workflow": config.workflow, "split": split, "tasks": len(chosen), "rollouts_per_task": samples}
        async with AsyncExitStack() as at_end:
            await at_end.enter_async_context(launch.opened(host, config, logger.warning, settled=runner.merger.settled))
            at_end.push_async_callback(runner.aclose)
            scoring = None
            if scorer is not None:
                scorer_engine = await at_end.enter_async_context(open_scorer_engine(resolved, scorer, opened.backend))
                scoring = Scoring(scorer, runner, scorer_engine, config)
                await at_end.enter_async_context(scoring.opened())
            try:
                with noting_blocking_calls(logger.warning):
                    rollouts = await play_all(runner, plan, "eval")
            except asyncio.CancelledError:
                have_succeeded = any(rollout.episode.trajectories for rollout in runner.finished)
                if measured is not None and have_succeeded and scoring is None:
                    measured(about | _measured(runner.finished, failures, ks, planned=len(plan)))
                raise
            if scoring is not None:
                rollouts, errors = await scoring.score_rollouts(rollouts, [task for task, _ in plan], "eval")
                for task_id, error in errors:
                    failures.add("unscored", error, "group scorer", task_id)
            result = about | _measured(rollouts, failures, ks, planned=len(plan))
            if measured is not None:
                measured(result)
    return result


def _measured(rollouts: Sequence[Rollout], failures: FirstFailures, ks: Sequence[int], planned: int) -> dict[str, Any]:
    for rollout in rollouts:
        failures.episodes((*rollout.failed, rollout.episode))
    episodes = [rollout.episode for rollout in rollouts]
    finished = [episode for episode in episodes if episode.trajectories]
    if not finished:
        raise RunError(f"all {len(episodes)} rollouts failed, the first with: {episodes[0].error}")
    rewards = [reward for episode in finished if (reward := episode.reward) is not None]
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for episode in finished:
        if episode.is_correct is not None:
            outcomes[episode.task_id].append(episode.is_correct)
    scores = []
    for k in ks:
        values = [pass_at_k(len(flags), sum(flags), k) for flags in outcomes.values() if len(flags) >= k]
        if values:
            low, high = interval(values)
            value = float(np.mean(values))
            scores.append({"k": k, "value": value, "low": low, "high": high, "tasks": len(values)})
    return {
        "unfinished": planned - len(rollouts),
        "failed": len(episodes) - len(finished),
        "retries": sum(len(rollout.failed) for rollout in rollouts),
        "reward_mean": float(np.mean(rewards)) if rewards else None,
        "pass_at_k": scores,
        "metrics": metric_means(finished),
        "failures": failures.to_list(),
    }


def _checkpoint(path: Path) -> Path:
    """Resolves ``path`` to a checkpoint folder: itself, or the latest one in a run folder."""
    if (path / checkpoint.MANIFEST).is_file():
        return path
    found = checkpoint.complete(path / "checkpoints")
    if not found:
        raise ConfigError(f"{path} is neither a complete checkpoint nor a run folder with one")
    return found[-1]
