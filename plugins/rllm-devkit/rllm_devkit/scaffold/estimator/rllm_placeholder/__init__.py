"""Hooks of estimator ``placeholder``. Listing plugins imports this module; keep it light."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import AdvantageEstimatorProvider

RLLM_CORE_API = "1.0"


@hookimpl
def advantage_estimators() -> list[AdvantageEstimatorProvider]:
    """Lists what this package provides. Classes are imported only when their name is selected."""
    return [
        AdvantageEstimatorProvider(
            name="placeholder",
            load="rllm_placeholder.estimator:PlaceholderEstimator",
            summary="Distance from the group's median reward.",
        )
    ]
