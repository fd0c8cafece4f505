"""A working reward function in a package without README, license or version bounds."""

from rllm_core import hookimpl
from rllm_core.providers import RewardFunctionProvider


@hookimpl
def reward_functions():
    return [RewardFunctionProvider(name="careless", load="rllm_careless.reward:score", summary="1 for any answer.")]
