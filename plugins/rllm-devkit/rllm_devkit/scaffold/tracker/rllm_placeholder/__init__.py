"""Hooks of tracker ``placeholder``. Listing plugins imports this module; keep it light."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import TrackerProvider

RLLM_CORE_API = "1.0"


@hookimpl
def trackers() -> list[TrackerProvider]:
    """Lists what this package provides. Classes are imported only when their name is selected."""
    return [
        TrackerProvider(
            name="placeholder",
            load="rllm_placeholder.tracker:PlaceholderTracker",
            config="rllm_placeholder.tracker:PlaceholderConfig",
            summary="Writes metrics to a CSV file in the run folder.",
        )
    ]
