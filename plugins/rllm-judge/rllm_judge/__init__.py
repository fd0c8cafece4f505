"""Plugin hooks of the judges. Listing plugins imports this module; keep it light."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import GroupScorerProvider, RewardFunctionProvider

RLLM_CORE_API = "1.0"


@hookimpl
def group_scorers() -> list[GroupScorerProvider]:
    """Provides group scorers ``relative`` and ``pairwise``."""
    return [
        GroupScorerProvider(
            name="relative",
            load="rllm_judge.relative:Relative",
            summary="A model compares the rollouts of a task and scores each from 0 to 1.",
        ),
        GroupScorerProvider(
            name="pairwise",
            load="rllm_judge.pairwise:Pairwise",
            summary="A model compares the rollouts of a task in pairs; Bradley-Terry scores.",
        ),
    ]


@hookimpl
def reward_functions() -> list[RewardFunctionProvider]:
    """Provides reward function ``judge``."""
    return [
        RewardFunctionProvider(
            name="judge",
            load="rllm_judge.absolute:judge",
            summary="A model grades one answer from 0 to 1 by a rubric.",
            variables=(
                "RLLM_JUDGE_MODEL",
                "RLLM_JUDGE_BASE_URL",
                "RLLM_JUDGE_RUBRIC",
                "OPENAI_API_KEY",
                "OPENAI_BASE_URL",
            ),
            processes=16,  # as many requests at a time as the scorers send by default
        )
    ]
