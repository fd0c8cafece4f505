"""Rollout host ``ray``: runs rollouts on the nodes of a Ray cluster. Importing this module does not import Ray."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import RolloutHostProvider

__all__ = ["__version__", "rollout_hosts"]

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def rollout_hosts() -> list[RolloutHostProvider]:
    """Provides rollout host ``ray``."""
    return [
        RolloutHostProvider(
            name="ray",
            load="rllm_ray.host:RayHost",
            summary="Processes on the nodes of a Ray cluster, an existing one or one of its own.",
            config="rllm_ray.config:RayConfig",
        )
    ]
