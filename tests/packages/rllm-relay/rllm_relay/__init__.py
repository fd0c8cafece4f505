"""A third-party workflow with its own section, several turns and a named reward function."""

from rllm_core import hookimpl
from rllm_core.providers import RewardFunctionProvider, WorkflowProvider

__version__ = "2.1"

RLLM_CORE_API = "1.0"


@hookimpl
def workflows() -> list[WorkflowProvider]:
    return [
        WorkflowProvider(
            name="relay",
            load="rllm_relay.workflow:Relay",
            config="rllm_relay.workflow:RelayConfig",
            run_file="rllm_relay.workflow:run_file",
            summary="Put the letters of one word after another in descending order.",
        )
    ]


@hookimpl
def reward_functions() -> list[RewardFunctionProvider]:
    return [
        RewardFunctionProvider(
            name="letters_in_place",
            load="rllm_relay.reward:letters_in_place",
            summary="The share of letters in their place, halved unless all are.",
        )
    ]
