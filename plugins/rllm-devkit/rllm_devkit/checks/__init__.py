"""Tools for plugin authors: contract checks, and a scripted engine and backend without torch."""

from rllm_core.testing.algorithms import check_correction, check_estimator, check_policy_loss
from rllm_core.testing.backends import check_backend
from rllm_core.testing.drift import Drift, probe_drift
from rllm_core.testing.engines import check_engine
from rllm_core.testing.parsers import CheckResult, check_parser
from rllm_core.testing.sandboxes import check_sandbox
from rllm_core.testing.scripted import ByteParser, ScriptedBackend, ScriptedEngine
from rllm_core.testing.trackers import check_tracker
from rllm_core.testing.workflows import check_workflow

__all__ = [
    "ByteParser",
    "CheckResult",
    "Drift",
    "ScriptedBackend",
    "ScriptedEngine",
    "check_backend",
    "check_correction",
    "check_engine",
    "check_estimator",
    "check_parser",
    "check_policy_loss",
    "check_sandbox",
    "check_tracker",
    "check_workflow",
    "probe_drift",
]
