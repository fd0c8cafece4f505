"""Tests of the backend's contract."""

from __future__ import annotations

from rllm_devkit.contracts import BackendContract


class TestContract(BackendContract):
    """Runs each contract check as a test, including the engine's."""

    name = "placeholder"
    overrides = ("optimizer.learning_rate=0.05",)
