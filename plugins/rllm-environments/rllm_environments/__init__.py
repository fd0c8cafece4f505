"""Trains on unmodified environments of reasoning-gym, TextArena, gymnasium and OpenEnv."""

from __future__ import annotations

from rllm_core import hookimpl
from rllm_core.providers import CommandProvider, RewardFunctionProvider, WorkflowProvider

__version__ = "0.1.0"

RLLM_CORE_API = "1.0"


@hookimpl
def workflows() -> list[WorkflowProvider]:
    """Provides one workflow per ecosystem; a key of its section selects the environment."""
    return [
        WorkflowProvider(
            name="reasoning_gym",
            load="rllm_environments.reasoning_gym.workflow:ReasoningGymWorkflow",
            config="rllm_environments.reasoning_gym.workflow:ReasoningGymConfig",
            run_file="rllm_environments.reasoning_gym.presets:run_file",
            variants="rllm_environments.reasoning_gym.datasets:variants",
            summary="Answer generated questions of reasoning-gym, scored by its checkers.",
        ),
        WorkflowProvider(
            name="gymnasium",
            load="rllm_environments.gymnasium_text.workflow:GymnasiumWorkflow",
            config="rllm_environments.gymnasium_text.workflow:GymnasiumConfig",
            run_file="rllm_environments.gymnasium_text.presets:run_file",
            variants="rllm_environments.gymnasium_text.names:variants",
            summary="Environments of gymnasium, MiniGrid and BabyAI, as text.",
        ),
        WorkflowProvider(
            name="textarena",
            load="rllm_environments.textarena.workflow:TextArenaWorkflow",
            config="rllm_environments.textarena.workflow:TextArenaConfig",
            run_file="rllm_environments.textarena.presets:run_file",
            variants="rllm_environments.textarena.names:variants",
            summary="Games of TextArena, against scripted players or in self-play.",
        ),
        WorkflowProvider(
            name="openenv",
            load="rllm_environments.openenv.workflow:OpenEnvWorkflow",
            config="rllm_environments.openenv.workflow:OpenEnvConfig",
            run_file="rllm_environments.openenv.presets:run_file",
            summary="Environments of OpenEnv, by the URL of their server.",
            waits_for_others=True,
        ),
    ]


@hookimpl
def reward_functions() -> list[RewardFunctionProvider]:
    """Provides the checkers from other packages as reward functions."""
    return [
        RewardFunctionProvider(
            name="reasoning_gym",
            load="rllm_environments.reasoning_gym.child:score",
            summary="The checker of a reasoning-gym dataset, for tasks of workflow reasoning_gym.",
        ),
    ]


@hookimpl
def cli_commands() -> list[CommandProvider]:
    """Provides command ``environments``."""
    return [
        CommandProvider(
            name="environments",
            load="rllm_environments.command:environments",
            summary="List, describe and audit environments from other packages.",
        ),
    ]
