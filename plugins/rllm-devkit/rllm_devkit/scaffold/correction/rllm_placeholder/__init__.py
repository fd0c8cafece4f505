"""Hooks of correction ``placeholder``. Listing plugins imports this module; keep it light."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import CorrectionProvider

RLLM_CORE_API = "1.0"


@hookimpl
def corrections() -> list[CorrectionProvider]:
    """Lists what this package provides. Classes are imported only when their name is selected."""
    return [
        CorrectionProvider(
            name="placeholder",
            load="rllm_placeholder.correction:PlaceholderCorrection",
            summary="Fades out tokens whose probability has moved.",
        )
    ]
