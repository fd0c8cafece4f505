"""rllm-core: a plugin framework for training language agents with reinforcement learning.

`train`, `evaluate` and `Run` are for programs and notebooks. The contracts are in `rllm_core.types`,
`rllm_core.engine`, `rllm_core.parser`, `rllm_core.backend` and `rllm_core.workflow`; the hooks in
`rllm_core.hookspecs`; the records that plugins return in `rllm_core.providers`.
"""

from typing import TYPE_CHECKING, Any

import rllm_core.moved  # noqa: F401 - makes the old names of modules importable
from rllm_core.hookspecs import hookimpl
from rllm_core.version import API_VERSION, __version__

if TYPE_CHECKING:
    from rllm_core.from_python import Run, evaluate, train

__all__ = ["API_VERSION", "Run", "__version__", "evaluate", "hookimpl", "train"]


def __getattr__(name: str) -> Any:
    """Imports `train`, `evaluate` and `Run` on first use, so that plugins and commands import the package quickly."""
    if name not in ("Run", "evaluate", "train"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("rllm_core.from_python"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
