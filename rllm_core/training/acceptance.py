"""Validation of the episodes that workflows return: task, steps, rewards and metrics.

A workflow may return anything. An accepted episode is a copy that the workflow can no longer change. Anything else is
rejected with an error that names the problem, the expected return value, and the location of ``run``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import numpy as np

from rllm_core.hosts.rollout_failures import Rejected
from rllm_core.plugins.blame import defined_at
from rllm_core.scope import SAMPLED, RolloutScope, sampled_of
from rllm_core.score import MAX_METRIC, MAX_REWARD
from rllm_core.text import printable
from rllm_core.tokens import TokenSpan
from rllm_core.types import Episode, Record, Step, Task, Trajectory
from rllm_core.workflow import Workflow

_ARRAYS = (np.ndarray, TokenSpan)
MAX_METRICS = 1000  # each becomes a key in every line of metrics.jsonl


def accept(
    returned: object,
    task: Task,
    workflow: Workflow,
    scope: RolloutScope,
    needs_reward: Callable[[str], bool] = lambda group: True,
) -> Episode:
    """Validates the return value of ``run``.

    ``needs_reward`` says whether a trajectory of a group (`Workflow.group_of`) must have a reward.

    Returns:
        A copy that shares no mutable object with ``returned``. If the episode reports a failure, only its task is
        checked, since nothing in it is trained.

    Raises:
        Rejected: If training cannot use it.
    """
    try:
        return _accepted(returned, task, workflow, scope, needs_reward)
    except Rejected as rejection:
        place = defined_at(type(workflow).run)
        where = f", {place.where}" if place is not None and place.where else ""
        raise Rejected(f"{rejection} (run() of workflow {name_of(workflow)!r}{where})") from None


def name_of(workflow: Workflow) -> str:
    """Returns the name of a workflow for messages; a class in a file of the user needs none."""
    return getattr(workflow, "name", type(workflow).__name__)


def _accepted(
    returned: object, task: Task, workflow: Workflow, scope: RolloutScope, needs_reward: Callable[[str], bool]
) -> Episode:
    if not isinstance(returned, Episode):
        hint = "; a return is missing" if returned is None else ""
        raise Rejected(
            f"run() returned {type(returned).__name__}, not an Episode{hint}; return self.episode(task, steps, "
            "reward=...) or an rllm_core.types.Episode"
        )
    if returned.task_id != task.task_id:
        raise Rejected(
            f"run() returned an episode of task {printable(str(returned.task_id))!r}; return one with "
            "task_id=task.task_id, made in this call"
        )
    if returned.termination_reason.is_failure:
        return returned
    _check_metrics(returned.metrics)
    seen: set[str] = set()
    for trajectory in _trajectories(returned):
        if trajectory.trainable:
            for step in trajectory.steps:
                _check_step(step, seen, scope)
            _check_reward(returned, trajectory, workflow, needs_reward)
    owned: Episode = _owned(returned)
    return owned


def _trajectories(episode: Episode) -> Iterator[Trajectory]:
    for trajectory in episode.trajectories:
        if not isinstance(trajectory, Trajectory):
            raise Rejected(f"trajectories contains a {type(trajectory).__name__}; use rllm_core.types.Trajectory")
        yield trajectory


def _check_step(step: object, seen: set[str], scope: RolloutScope) -> None:
    if not isinstance(step, Step):
        raise Rejected(
            f"a trajectory contains a {type(step).__name__}; put the steps that completer.complete() returned in it"
        )
    if step.step_id in seen:
        raise Rejected(
            "a step appears twice in the episode and would be trained twice; put each step that "
            "completer.complete() returned into one trajectory, once"
        )
    seen.add(step.step_id)
    if step.weight_version is None:
        return  # target tokens of supervised training, which the policy did not sample
    answer = scope.answers.get(step.step_id)
    if answer is None:
        raise Rejected(
            "a step was not sampled in this rollout; use only steps that this call's completer and its forks "
            "returned, and keep none in the workflow between rollouts"
        )
    if all(map(is_, sampled_of(step), answer.sampled)):
        return
    for name, original in zip(SAMPLED, answer.sampled, strict=True):
        if not _same(step.__dict__.get(name), original):
            raise Rejected(f"the {name} of a step were changed; do not modify steps that completer.complete() returned")


def _same(mine: Any, original: Any) -> bool:
    if isinstance(mine, _ARRAYS) and isinstance(original, _ARRAYS):
        return np.array_equal(mine, original)
    return not isinstance(mine, _ARRAYS) and not isinstance(original, _ARRAYS) and bool(mine == original)


def _check_reward(
    episode: Episode, trajectory: Trajectory, workflow: Workflow, needs_reward: Callable[[str], bool]
) -> None:
    group = workflow.group_of(episode, trajectory)
    if not isinstance(group, str) or not group:
        raise Rejected(f"group_of() returned {printable(repr(group))}; return a name, such as trajectory.role")
    if not trajectory.has_reward and not needs_reward(group):
        return
    if not trajectory.has_reward:
        raise Rejected(
            f"the trajectory of role {trajectory.role!r} has no reward; pass reward=..., or set the rewards of its "
            "steps. A missing reward is not a reward of 0"
        )
    given = [trajectory.reward, *[step.reward for step in trajectory.steps]]
    rewards = [reward for reward in given if reward is not None]
    for reward in rewards:
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise Rejected(f"{printable(repr(reward))} is not a reward; a reward must be a finite number")
    for value in (trajectory.total_reward, *rewards):
        if not abs(value) <= MAX_REWARD:
            raise Rejected(f"a reward of {value:g} cannot be trained on: its magnitude exceeds {MAX_REWARD:g}")


def _check_metrics(metrics: dict[str, float]) -> None:
    if len(metrics) > MAX_METRICS:
        raise Rejected(
            f"metrics has {len(metrics):,} entries, but the limit is {MAX_METRICS:,}; put data into metadata, and only "
            "numbers to average into metrics"
        )
    if "" in metrics:
        raise Rejected("a metric has no name: its key in metrics is an empty text; name it")
    for name, value in metrics.items():
        if not abs(value) <= MAX_METRIC:
            raise Rejected(f"a metric of {value:g} cannot be averaged: metrics[{name!r:.80}] exceeds {MAX_METRIC:g}")


def _owned(record: Any) -> Any:
    """Copies ``record`` and the records in its lists; arrays, messages and JSON data are immutable."""
    if type(record) is Step:
        return record._copied()
    fields = dict(record.__dict__)
    for name, value in fields.items():
        if type(value) is list:
            fields[name] = [_owned(item) if isinstance(item, Record) else item for item in value]
        elif type(value) is dict:
            fields[name] = dict(value)
    if type(record) in (Episode, Trajectory):
        return type(record)._trusted(**fields)
    return record.model_copy(update=fields)  # a plugin's subclass may have state besides its fields
