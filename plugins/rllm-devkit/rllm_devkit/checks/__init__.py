"""Contract checks, one function per kind of provider."""

from rllm_devkit.checks.algorithms import check_correction, check_estimator, check_policy_loss
from rllm_devkit.checks.backends import check_backend
from rllm_devkit.checks.drift import Drift, probe_drift
from rllm_devkit.checks.engines import check_engine
from rllm_devkit.checks.group_scorers import check_group_scorer
from rllm_devkit.checks.hosts import check_rollout_host
from rllm_devkit.checks.parsers import check_parser
from rllm_devkit.checks.results import CheckResult
from rllm_devkit.checks.rewards import check_reward_function
from rllm_devkit.checks.sandboxes import check_sandbox
from rllm_devkit.checks.task_samplers import check_task_sampler
from rllm_devkit.checks.trackers import check_tracker
from rllm_devkit.checks.workers import check_worker
from rllm_devkit.checks.workflows import check_workflow

__all__ = [
    "CheckResult",
    "Drift",
    "check_backend",
    "check_correction",
    "check_engine",
    "check_estimator",
    "check_group_scorer",
    "check_parser",
    "check_policy_loss",
    "check_reward_function",
    "check_rollout_host",
    "check_sandbox",
    "check_task_sampler",
    "check_tracker",
    "check_worker",
    "check_workflow",
    "probe_drift",
]
