"""Hooks of policy loss ``placeholder``. Listing plugins imports this module; keep it light."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import PolicyLossProvider

RLLM_CORE_API = "1.0"


@hookimpl
def policy_losses() -> list[PolicyLossProvider]:
    """Lists what this package provides. Classes are imported only when their name is selected."""
    return [
        PolicyLossProvider(
            name="placeholder",
            load="rllm_placeholder.loss:PlaceholderLoss",
            summary="Policy gradient with a saturating ratio.",
        )
    ]
