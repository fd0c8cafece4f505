"""The contract of a backend."""

from __future__ import annotations

from rllm_core.testing.contracts import BackendContract


class TestContract(BackendContract):
    """One test per check of rllm-core, its engine's included."""

    name = "placeholder"
    overrides = ("optimizer.learning_rate=0.05",)
