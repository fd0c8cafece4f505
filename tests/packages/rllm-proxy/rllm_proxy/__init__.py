"""A third-party engine that wraps one of another package and has its own section."""

from rllm_core import hookimpl
from rllm_core.providers import EngineProvider

__version__ = "0.3"

RLLM_CORE_API = "1.0"


@hookimpl
def rollout_engines() -> list[EngineProvider]:
    return [
        EngineProvider(
            name="proxy",
            load="rllm_proxy.engine:ProxyEngine",
            config="rllm_proxy.engine:ProxyConfig",
            summary="Passes calls on to another engine, and counts them.",
        )
    ]
