"""Contract checks for workflows; see `check_workflow`."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from pydantic import ValidationError

from rllm_core.assembly.tasks import checkable
from rllm_core.providers import NAME_PATTERN
from rllm_core.types import Episode, Step, Task, Trajectory
from rllm_core.workflow import ENDLESS, Workflow, WorkflowConfig
from rllm_devkit.checks.results import Check, CheckResult, NotApplicable, Violation, checked
from rllm_devkit.checks.watch import LoopWatch, held
from rllm_devkit.checks.workflow_faults import FAULT_CHECKS
from rllm_devkit.checks.workflow_probe import SPLITS, ProbedRollout, WorkflowProbe, tasks_of, together

SEEDS = 4  # rollouts per task
AT_A_TIME = 16
MAX_TASKS = 20_000  # checked one by one per split


async def check_workflow(
    make: Callable[[], Workflow],
    *,
    answers: Sequence[str] = (),
    seed: int = 0,
    tasks_per_split: int = 3,
    rollout_timeout_seconds: float = 60.0,
    max_block_seconds: float = 2.0,
) -> list[CheckResult]:
    """Checks a workflow against its contract, with a scripted model that gives plausible and hostile answers.

    In a test: ``assert not [r for r in await check_workflow(Mine) if r.outcome == "failed"]``.

    Args:
        make: Constructs a new workflow.
        answers: Answers that fit the tasks, in addition to values from their data; they help rollouts get further.
        seed: Seed of the answers; equal seeds draw equal answers.
        tasks_per_split: Number of tasks of each split to run.
        rollout_timeout_seconds: Timeout of a rollout, in seconds.
        max_block_seconds: Maximum time a rollout may block the event loop. Longer blocking is interrupted and fails.

    Returns:
        One result per check. An exception raised by the workflow fails the check that called it.
    """
    with LoopWatch(max_block_seconds) as watch:
        probe = WorkflowProbe(make, answers, seed, tasks_per_split, rollout_timeout_seconds, watch)
        try:
            return await checked(probe, WORKFLOW_CHECKS)
        finally:
            await probe.close()


# --------------------------------------------------------------------------------------------------------------------
# Construction, settings and tasks


async def _construction(probe: WorkflowProbe) -> str:
    one, other = probe.make(), probe.make()
    for made in (one, other):
        if not isinstance(made, Workflow):
            raise Violation(f"{made!r:.80} is not a Workflow")
    if one is other:
        raise Violation("constructing it twice returned the same instance")
    name = getattr(type(one), "name", None)
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise Violation(f"the name {name!r} must match {NAME_PATTERN.pattern}")
    return f"workflow {name!r}"


async def _settings(probe: WorkflowProbe) -> str:
    model = type(probe.workflow).config_model
    if not isinstance(model, type) or not issubclass(model, WorkflowConfig):
        raise Violation(f"config_model must be a subclass of rllm_core.workflow.WorkflowConfig, got {model!r:.80}")
    silent = [name for name, found in model.model_fields.items() if not found.description]
    if silent:
        raise Violation(f"{model.__name__}: add Field(description=...) to {', '.join(silent)}")
    try:
        model.model_validate({"no_such_key": 1})
    except ValidationError as error:
        if any(found["type"] == "extra_forbidden" for found in error.errors()):
            return ", ".join(model.model_fields) or "none"
    raise Violation(f"{model.__name__} must reject unknown keys")


async def _tasks(probe: WorkflowProbe) -> str:
    counts = []
    for split in SPLITS:
        tasks, again, others = (tasks_of(made, split) for made in (probe.workflow, probe.workflow, probe.make()))
        for which, compared in (("on a second call", again), ("in another instance", others)):
            if len(compared) != len(tasks):
                raise Violation(f"tasks({split!r}) has {len(tasks)} tasks, but {len(compared)} {which}")
            for number in islice(checkable(tasks, MAX_TASKS), MAX_TASKS):
                if _written(tasks[number]) != _written(compared[number]):
                    raise Violation(f"task {number} of {split!r} is different {which}")
        if split == "train" and not len(tasks):
            raise Violation("there are no training tasks")
        counts.append(f"{'endless' if len(tasks) == ENDLESS else len(tasks)} {split}")
    return ", ".join(counts)


def _written(task: Task) -> str:
    """Returns a task as JSON, and checks that nothing is lost."""
    try:
        text = task.to_json()
        is_same = Task.from_json(text) == Task(task_id=task.task_id, data=task.data)
    except (TypeError, ValueError) as error:
        raise Violation(f"task {task.task_id!r:.80} cannot be written as JSON: {error}") from error
    if not is_same:
        raise Violation(f"task {task.task_id!r:.80} changes when written to JSON and read back")
    return text


async def _splits(probe: WorkflowProbe) -> str:
    train, validation = (
        [tasks[number] for number in islice(checkable(tasks, MAX_TASKS), MAX_TASKS)]
        for tasks in (tasks_of(probe.workflow, split) for split in SPLITS)
    )
    if not validation:
        raise NotApplicable("there are no validation tasks")
    shared = {task.task_id for task in train} & {task.task_id for task in validation}
    if shared:
        raise Violation(f"{len(shared)} task ids are in both splits, for example {min(shared)!r}; ids must be unique")
    known = {json.dumps(json.loads(_written(task))["data"], sort_keys=True) for task in train if task.data}
    held = {json.dumps(json.loads(_written(task))["data"], sort_keys=True) for task in validation if task.data}
    leaked = known & held
    if leaked and leaked != held:
        raise Violation(
            f"{len(leaked)} of {len(held)} validation tasks are training tasks with another id, for example "
            f"{min(leaked)}: hold out different tasks, or use exactly the same tasks in both splits"
        )
    if leaked:
        return "both splits have the same tasks, with different ids"
    known, held = _questions(train), _questions(validation)
    if known & held and len(known | held) > 1:  # one question for all tasks reveals nothing about a task
        raise Violation(
            f"{len(known & held)} of {len(held)} questions of the validation tasks are in training, too, apart from "
            f"case and spaces, for example {min(known & held)!r:.80}: hold out different questions"
        )
    return "no task is in both splits" + (", and no question" if held else "")


def _questions(tasks: Sequence[Task]) -> set[str]:
    """Returns the questions of tasks that have them in their data, in a form that can be compared."""
    found = (task.data.get("question") for task in tasks)
    return {" ".join(question.casefold().split()) for question in found if isinstance(question, str)}


# --------------------------------------------------------------------------------------------------------------------
# Episodes


async def _opening(probe: WorkflowProbe) -> str:
    await probe.open()
    opened = [f"{count - probe.held[what]} {what}" for what, count in held().items() if count > probe.held[what]]
    return ", ".join(opened) or "opens nothing"


async def _episodes(probe: WorkflowProbe) -> str:
    if not probe.held:
        raise NotApplicable("it could not be opened")
    workflow, played = probe.workflow, []
    for task in probe.tasks():
        for seed in range(SEEDS):
            rollout = await probe.play(task, seed=seed)
            episode = rollout.episode()
            if workflow.samples is not bool(rollout.asked):
                said = "called the model, but samples is False" if rollout.asked else "never called the model"
                raise Violation(f"task {task.task_id!r}: run() {said}")
            played.append((rollout, episode))
    probe.played = played
    reasons = Counter(episode.termination_reason.value for _, episode in played)
    asked = [rollout.asked for rollout, _ in played]
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    return f"{len(played)} rollouts of {min(asked)} to {max(asked)} turns: {ends}"


def _played(probe: WorkflowProbe) -> list[tuple[ProbedRollout, Episode]]:
    if not probe.played:
        raise NotApplicable("no rollout could be run")
    return probe.played


async def _rewards(probe: WorkflowProbe) -> str:
    rewards = [reward for _, episode in _played(probe) for reward in probe.check_rewards(episode)]
    if not rewards:
        raise NotApplicable("it gives no rewards")
    return f"{len(set(rewards))} different, from {min(rewards):g} to {max(rewards):g}"


async def _records(probe: WorkflowProbe) -> str:
    size = 0
    for _, episode in _played(probe):
        try:
            with warnings.catch_warnings(action="error"):  # warns of values of the wrong type
                text = episode.to_json()
            again = Episode.from_json(text)
        except (TypeError, ValueError, UserWarning) as error:
            raise Violation(f"task {episode.task_id!r}: the episode cannot be written as JSON: {error}") from error
        if again.to_json() != text or comparable(again) != comparable(episode):
            raise Violation(f"task {episode.task_id!r}: the episode changes when written to JSON and read back")
        size = max(size, len(text))
    return f"largest episode {size} characters"


async def _steps(probe: WorkflowProbe) -> str:
    kept = sampled = 0
    for rollout, episode in _played(probe):
        given = {step.step_id: (conversation, place, step) for place, (conversation, step) in enumerate(rollout.given)}
        sampled += len(given)
        for trajectory in episode.trajectories:
            where = f"task {episode.task_id!r}, role {trajectory.role!r}"
            latest: dict[int, int] = {}
            for step in trajectory.steps:
                conversation, place, original = given.get(step.step_id, (-1, -1, None))
                if original is None and step.logprobs is None and step.weight_version is None:
                    continue  # target tokens, not sampled
                if original is None or not _is_as_sampled(step, original):
                    raise Violation(f"{where}: a step differs from the completer's; return its steps unchanged")
                if place <= latest.get(conversation, -1):
                    raise Violation(f"{where}: steps are repeated or not in the order they were sampled")
                latest[conversation] = place
                kept += 1
        seen = {step.step_id for trajectory in episode.trajectories for step in trajectory.steps}
        if given and seen.isdisjoint(given):
            raise Violation(f"task {episode.task_id!r}: the episode has none of the {len(given)} sampled steps")
    return f"{kept} of {sampled} sampled steps are in the episodes"


def _is_as_sampled(step: Step, original: Step) -> bool:
    names = ("prompt_ids", "completion_ids", "logprobs")
    return (
        all(_listed(getattr(step, name)) == _listed(getattr(original, name)) for name in names)
        and (step.weight_version, step.segment, step.finish_reason)
        == (original.weight_version, original.segment, original.finish_reason)
        and step.messages == original.messages
    )


def _listed(array: Any) -> Any:
    return None if array is None else array.tolist()


async def _groups(probe: WorkflowProbe) -> str:
    found: set[str] = set()
    for _, episode in _played(probe):
        for trajectory in episode.trajectories:
            first, again = (_group(probe.workflow, episode, trajectory) for _ in range(2))
            if first != again:
                raise Violation(f"group_of() returns {first!r}, but {again!r} on a second call")
            found.add(first)
    return ", ".join(sorted(found))


def _group(workflow: Workflow, episode: Episode, trajectory: Trajectory) -> str:
    group: Any = workflow.group_of(episode, trajectory)
    if not isinstance(group, str) or not group:
        raise Violation(f"group_of() must return a non-empty string, got {group!r:.80}")
    return group


async def _tasks_left_alone(probe: WorkflowProbe) -> str:
    _played(probe)
    untouched = dataclasses.replace(probe, held={}, played=[], _workflow=None)
    for task, other in zip(probe.tasks(), untouched.tasks(), strict=True):
        await probe.play(task)
        if _written(task) != _written(other):
            raise Violation(f"task {other.task_id!r} was modified by its rollouts; copy the data before changing it")
    return f"{len(probe.tasks())} tasks"


# --------------------------------------------------------------------------------------------------------------------
# Many rollouts in one instance


def comparable(episode: Episode) -> Any:
    """Returns an episode without the parts that vary: ids, metadata and times (``*_seconds``)."""
    return _without_ids(json.loads(episode.to_json()))


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        dropped = ("step_id", "rollout_id", "metadata")
        return {
            key: _without_ids(item)
            for key, item in value.items()
            if key not in dropped and not (key.endswith("_seconds") and isinstance(item, float))
        }
    return [_without_ids(item) for item in value] if isinstance(value, list) else value


def _difference(left: Any, right: Any, path: str = "episode") -> str:
    """Describes the first difference of two JSON values."""
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return next(_difference(left[key], right[key], f"{path}.{key}") for key in left if left[key] != right[key])
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        places = [index for index in range(len(left)) if left[index] != right[index]]
        return _difference(left[places[0]], right[places[0]], f"{path}[{places[0]}]")
    return f"{path} is {left!r:.60} and {right!r:.60}"


async def _determinism(probe: WorkflowProbe) -> str:
    rollouts = _played(probe)
    other = dataclasses.replace(probe, held={}, played=[], _workflow=None)
    other.tasks()
    await other.open()
    try:
        for place, (rollout, episode) in enumerate(rollouts):
            for player, who in ((probe, "on a second run"), (other, "in another instance")):
                again = (await player.play(rollout.task, seed=place % SEEDS)).episode()
                if comparable(again) != comparable(episode):
                    difference = _difference(comparable(episode), comparable(again))
                    raise Violation(f"task {episode.task_id!r}: with equal seeds and answers, {who}: {difference}")
    finally:
        await other.close()
    return f"{len(rollouts)} rollouts, identical on a second run and in another instance"


async def _concurrency(probe: WorkflowProbe) -> str:
    rollouts = _played(probe)
    many = [rollouts[index % len(rollouts)] for index in range(max(AT_A_TIME, len(rollouts)))]
    places = [index % len(rollouts) % SEEDS for index in range(len(many))]
    calls = (probe.play(rollout.task, seed=seed, pauses=True) for (rollout, _), seed in zip(many, places, strict=True))
    for (_, alone), rollout in zip(many, await together(calls), strict=True):
        found = rollout.episode()
        if comparable(found) != comparable(alone):
            difference = _difference(comparable(alone), comparable(found))
            raise Violation(f"task {alone.task_id!r}: concurrent rollouts change the episode: {difference}")
    return f"{len(many)} at a time"


WORKFLOW_CHECKS: dict[str, Check[WorkflowProbe]] = {
    "construction": _construction,
    "settings": _settings,
    "tasks": _tasks,
    "splits": _splits,
    "opening": _opening,
    "episodes": _episodes,
    "rewards": _rewards,
    "records": _records,
    "steps": _steps,
    "groups": _groups,
    "tasks left alone": _tasks_left_alone,
    "determinism": _determinism,
    "concurrency": _concurrency,
    **FAULT_CHECKS,
}
"""Checks by name; each runs some rollouts and returns its findings."""
