"""rllm-local: backend ``local``, which trains and samples with torch in this process.

Importing this module does not import torch; the classes behind the provider records load when they are selected.
"""

from rllm_core import hookimpl
from rllm_core.providers import BackendProvider, EngineProvider

__all__ = ["__version__", "backends", "rollout_engines"]

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def backends() -> list[BackendProvider]:
    """Provides the in-process backend."""
    return [
        BackendProvider(
            name="local",
            load="rllm_local.backend:LocalBackend",
            summary="transformers + torch in this process: one GPU or the CPU, full fine-tuning or LoRA.",
            config="rllm_local.config:LocalConfig",
            default_parser="chat_template",
            export="rllm_local.export:export",
        )
    ]


@hookimpl
def rollout_engines() -> list[EngineProvider]:
    """Provides the backend's engine on its own, for evaluation or as a teacher."""
    return [
        EngineProvider(
            name="local",
            load="rllm_local.standalone:StandaloneEngine",
            summary="transformers + torch in this process; samples and scores.",
        )
    ]
