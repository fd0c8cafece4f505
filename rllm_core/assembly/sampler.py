"""Creates the task sampler of a run."""

from __future__ import annotations

from collections.abc import Sequence

from rllm_core.algorithms.task_sampler import TaskSampler
from rllm_core.assembly.components import create
from rllm_core.assembly.resolution import Resolved
from rllm_core.returned_values import checked, json_object
from rllm_core.types import Task


def sampler_of(resolved: Resolved, tasks: Sequence[Task]) -> TaskSampler:
    """Creates the task sampler of a run for its training tasks.

    Raises:
        ConfigError: If the sampler's options are wrong, or do not fit the tasks.
        PluginError: If the sampler is missing or broken.
        RunError: If the sampler fails to start, or its state is not JSON.
    """
    training = resolved.config.training
    sampler: TaskSampler = create(
        resolved.plugins,
        resolved.sampler,
        "training.sampler",
        training.sampler,
        training.sampler_options,
        "training.sampler_options",
    )
    sampler.attempt(sampler.begin, tasks, training.seed)
    state = sampler.attempt(sampler.state_dict)
    checked(sampler.label, json_object, state, "state_dict()")  # before hours of training
    return sampler
