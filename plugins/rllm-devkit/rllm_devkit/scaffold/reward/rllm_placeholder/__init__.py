"""Hooks of reward function ``placeholder``. Listing plugins imports this module; keep it light."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import RewardFunctionProvider

RLLM_CORE_API = "1.0"


@hookimpl
def reward_functions() -> list[RewardFunctionProvider]:
    """Lists what this package provides. Functions are imported only when their name is selected."""
    return [
        RewardFunctionProvider(
            name="placeholder",
            load="rllm_placeholder.reward:score",
            summary="1 for the answer, up to half for its characters.",
        )
    ]
