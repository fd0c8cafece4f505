"""Hooks of group scorer ``placeholder``. Listing plugins imports this module; keep it light."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import GroupScorerProvider

RLLM_CORE_API = "1.0"


@hookimpl
def group_scorers() -> list[GroupScorerProvider]:
    """Lists what this package provides. Classes are imported only when their name is selected."""
    return [
        GroupScorerProvider(
            name="placeholder",
            load="rllm_placeholder.scorer:PlaceholderScorer",
            summary="Ranks the rollouts of a group by reward; shorter ones come first.",
        )
    ]
