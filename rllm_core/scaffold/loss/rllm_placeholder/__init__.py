"""Policy loss ``placeholder`` for rllm-core: hooks only, so that listing it imports no torch."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import PolicyLoss

RLLM_CORE_API = "1.0"


@hookimpl
def policy_losses() -> list[PolicyLoss]:
    """What this package provides; the class is imported when somebody selects its name."""
    return [
        PolicyLoss(
            name="placeholder",
            load="rllm_placeholder.loss:PlaceholderLoss",
            summary="The policy gradient with a ratio that saturates.",
        )
    ]
