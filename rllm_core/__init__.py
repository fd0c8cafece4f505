"""rllm-core: a plugin framework for training language agents with reinforcement learning.

The contracts are in `rllm_core.types`, `rllm_core.engine`, `rllm_core.parser`, `rllm_core.backend` and
`rllm_core.workflow`; the hooks in `rllm_core.hookspecs`; what plugins return in `rllm_core.providers`.
"""

import rllm_core.moved  # noqa: F401 - makes the old names of modules importable
from rllm_core.hookspecs import hookimpl
from rllm_core.version import API_VERSION, __version__

__all__ = ["API_VERSION", "__version__", "hookimpl"]
