"""Names of the checks per kind of provider, which pytest needs before any check runs."""

from __future__ import annotations

from collections.abc import Callable

from rllm_core import providers

BUILT = "built"
RUN_FILE = "run file"


def checks_of(kind: type[providers.Provider]) -> tuple[str, ...]:
    """Returns the names of the checks for a kind of provider; for losses, this imports torch."""
    return (BUILT, *_NAMES[kind]()) if kind in _NAMES else (BUILT,)


def _workflow_names() -> list[str]:
    from rllm_devkit.checks.workflows import WORKFLOW_CHECKS

    return [RUN_FILE, *WORKFLOW_CHECKS]


def _rollout_host_names() -> list[str]:
    from rllm_devkit.checks.hosts import ROLLOUT_HOST_CHECKS

    return list(ROLLOUT_HOST_CHECKS)


def _tracker_names() -> list[str]:
    from rllm_devkit.checks.trackers import TRACKER_CHECKS

    return list(TRACKER_CHECKS)


def _parser_names() -> list[str]:
    from rllm_devkit.checks.parsers import CHECKS

    return list(CHECKS)


def _engine_names() -> list[str]:
    from rllm_devkit.checks.engines import ENGINE_CHECKS

    return list(ENGINE_CHECKS)


def _backend_names() -> list[str]:
    from rllm_devkit.checks.backends import BEFORE_TRAINING, TRAINING

    return [*BEFORE_TRAINING, *(f"engine: {name}" for name in _engine_names()), *TRAINING]


def _estimator_names() -> list[str]:
    from rllm_devkit.checks.algorithms import ESTIMATOR_CHECKS

    return ["options", *ESTIMATOR_CHECKS]


def _correction_names() -> list[str]:
    from rllm_devkit.checks.algorithms import CORRECTION_CHECKS

    return ["options", *CORRECTION_CHECKS]


def _group_scorer_names() -> list[str]:
    from rllm_devkit.checks.group_scorers import GROUP_SCORER_CHECKS

    return list(GROUP_SCORER_CHECKS)


def _task_sampler_names() -> list[str]:
    from rllm_devkit.checks.task_samplers import TASK_SAMPLER_CHECKS

    return list(TASK_SAMPLER_CHECKS)


def _loss_names() -> list[str]:
    from rllm_devkit.checks.losses import LOSS_CHECKS

    return ["options", *LOSS_CHECKS]


def _reward_names() -> list[str]:
    from rllm_devkit.checks.rewards import REWARD_CHECKS

    return list(REWARD_CHECKS)


def _sandbox_names() -> list[str]:
    from rllm_devkit.checks.sandboxes import SANDBOX_CHECKS

    return list(SANDBOX_CHECKS)


_NAMES: dict[type[providers.Provider], Callable[[], list[str]]] = {
    providers.WorkflowProvider: _workflow_names,
    providers.RolloutHostProvider: _rollout_host_names,
    providers.TrackerProvider: _tracker_names,
    providers.ParserProvider: _parser_names,
    providers.EngineProvider: _engine_names,
    providers.BackendProvider: _backend_names,
    providers.AdvantageEstimatorProvider: _estimator_names,
    providers.PolicyLossProvider: _loss_names,
    providers.CorrectionProvider: _correction_names,
    providers.GroupScorerProvider: _group_scorer_names,
    providers.TaskSamplerProvider: _task_sampler_names,
    providers.RewardFunctionProvider: _reward_names,
    providers.SandboxProvider: _sandbox_names,
}
