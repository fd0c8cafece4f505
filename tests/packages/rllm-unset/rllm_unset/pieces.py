"""Classes of the provider records."""

import numpy as np
from pydantic import Field

from rllm_core.algorithms.advantages import AdvantageEstimator
from rllm_core.algorithms.corrections import Correction
from rllm_core.config import Section
from rllm_core.hosts.inline import Inline
from rllm_core.tracker import Tracker
from rllm_core.types import Task
from rllm_core.workflow import Workflow, WorkflowConfig


class UnsetConfig(WorkflowConfig):
    """``[unset]``."""

    words: int = Field(default=3, description="How many words there are.")


class TrackerConfig(Section):
    """Settings of a tracker."""

    path: str = Field(default="", description="Where it writes.")


class Unset(Workflow):
    name = "unset"
    config_model = UnsetConfig

    def tasks(self, split):
        return [Task(task_id=f"{split}-{number}") for number in range(self.config.words)]

    async def run(self, task, completer):
        step = await completer.complete([{"role": "user", "content": task.task_id}])
        return self.episode(task, [step], reward=1.0)


class Otherwise(Unset):
    name = "otherwise"


class UnsetHost(Inline):
    name = "unset-host"
    config_model = TrackerConfig


class UnsetTracker(Tracker):
    name = "unset-tracker"
    config_model = TrackerConfig

    def start(self, config, run_dir):
        pass

    def log(self, step, metrics):
        pass

    def finish(self, status):
        pass


class Sectioned(AdvantageEstimator):
    config_model = TrackerConfig

    def __call__(self, groups):
        return [[np.zeros(len(trajectory.steps)) for trajectory in group.trajectories] for group in groups]


class Configured(Correction):
    is_mask = True

    def __call__(self, log_ratios, starts):
        return np.ones(len(log_ratios))


def no_model():
    pass
