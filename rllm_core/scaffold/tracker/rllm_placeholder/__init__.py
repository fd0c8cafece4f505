"""Tracker ``placeholder`` for rllm-core: hooks only, so that listing it imports nothing else."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import Tracker

RLLM_CORE_API = "1.0"


@hookimpl
def trackers() -> list[Tracker]:
    """What this package provides; the class is imported when somebody selects its name."""
    return [
        Tracker(
            name="placeholder",
            load="rllm_placeholder.tracker:PlaceholderTracker",
            config="rllm_placeholder.tracker:PlaceholderConfig",
            summary="Metrics as a CSV file in the run folder.",
        )
    ]
