"""Trains on the environments of reasoning-gym, TextArena, gymnasium and OpenEnv, unedited."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import WorkflowProvider

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def workflows() -> list[WorkflowProvider]:
    """The workflows of this package."""
    return [
        WorkflowProvider(
            name="gymnasium",
            load="rllm_environments.gymnasium_text.workflow:GymnasiumWorkflow",
            config="rllm_environments.gymnasium_text.workflow:GymnasiumConfig",
            run_file="rllm_environments.gymnasium_text.presets:run_file",
            summary="Environments of gymnasium, MiniGrid and BabyAI, as text.",
        ),
        WorkflowProvider(
            name="textarena",
            load="rllm_environments.textarena.workflow:TextArenaWorkflow",
            config="rllm_environments.textarena.workflow:TextArenaConfig",
            run_file="rllm_environments.textarena.presets:run_file",
            summary="Games of TextArena, against scripted players or in self-play.",
            global_state=True,
        ),
    ]
