"""A reward function that works; its package has neither README nor licence, and names no version of anything."""

from rllm_core import hookimpl
from rllm_core.providers import RewardFunction


@hookimpl
def reward_functions():
    return [RewardFunction(name="careless", load="rllm_careless.reward:score", summary="1 for any answer.")]
