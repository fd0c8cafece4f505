"""Passes tasks from the task sampler to a run's groups, and the groups' results back to the sampler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from rllm_core.algorithms.task_sampler import GroupResult, Outcome, TaskSampler, check_same_tasks, checked_positions
from rllm_core.returned_values import checked, finite_numbers, json_object
from rllm_core.training.group import Group
from rllm_core.types import Task


class TaskDraws:
    """Keeps the task of every group until the group has ended, no matter how often it is started.

    Results wait for the next weight sync and are handed over by ordinal. With ``staleness_threshold = 0`` all groups
    of a sync window have ended by then, so that the sampler's choices do not depend on which group ended first.

    Args:
        sampler: Task sampler, which has started with the same tasks.
    """

    def __init__(self, sampler: TaskSampler, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self._sampler = sampler
        self._learns = type(sampler).observe is not TaskSampler.observe
        self._drawn = 0
        self._chosen: dict[int, int] = {}  # position of the task, by ordinal
        self._results: list[GroupResult] = []

    def __getitem__(self, ordinal: int) -> Task:
        """Returns the task of a group that has not ended, or whose result has not been handed over."""
        return self.tasks[self._chosen[ordinal]]

    def draw(self, ordinal: int, groups: int) -> Task:
        """Returns the task of a starting group; if it has none yet, the sampler chooses tasks for ``groups`` groups.

        Raises:
            RunError: If the sampler fails.
        """
        if ordinal not in self._chosen:
            returned = self._sampler.attempt(self._sampler.next, groups)
            positions = checked(self._sampler.label, checked_positions, returned, groups, self.tasks)
            self._chosen |= dict(enumerate(positions, self._drawn))
            self._drawn += groups
        return self[ordinal]

    def epoch(self, ordinal: int) -> int:
        """Returns the epoch of ``ordinal``, from 0."""
        length = self._sampler.epoch_tasks
        return ordinal // length if length else 0

    def ends_epoch(self, ordinal: int) -> bool:
        """Whether ``ordinal`` is the last of its epoch."""
        return self.epoch(ordinal + 1) > self.epoch(ordinal)

    def ended(self, group: Group, outcome: Outcome, reason: str) -> None:
        """Keeps the result of a group that will not be started again."""
        rewards = [reward for episode in group.episodes if (reward := episode.reward) is not None]
        judged = [episode.is_correct for episode in group.episodes if episode.is_correct is not None]
        self._results.append(
            GroupResult(
                ordinal=group.ordinal,
                position=self._chosen[group.ordinal],
                outcome=outcome,
                reason=reason,
                solved=fmean(judged) if judged else None,
                rewards=tuple(rewards),
                weight_version=group.weight_version,
                step=0,  # set by `hand_over`
            )
        )

    def trained(self, groups: Iterable[Group]) -> None:
        """Keeps the results of the groups of an optimizer step."""
        for group in groups:
            if group.filtered is None:
                self.ended(group, "trained", "trained")
            else:
                self.ended(group, "filtered", group.filtered.value)

    def skipped(self, ordinal: int, *, weight_version: int, step: int) -> None:
        """Reports a quarantined task to the sampler at once: otherwise the sampler might choose it forever."""
        position = self._chosen.pop(ordinal)
        if self._learns:
            result = GroupResult(ordinal, position, "skipped", "quarantine", None, (), weight_version, step)
            self._sampler.attempt(self._sampler.observe, result)

    def hand_over(self, *, step: int) -> None:
        """Reports the results since the last weight sync to the sampler; ``step`` counts the optimizer steps done."""
        results, self._results = sorted(self._results, key=lambda result: result.ordinal), []
        for result in results:
            del self._chosen[result.ordinal]
            if self._learns:
                self._sampler.attempt(self._sampler.observe, replace(result, step=step))

    def metrics(self) -> dict[str, float]:
        """Returns the sampler's own metrics.

        Raises:
            RunError: If they are not finite numbers by name.
        """
        sampler = self._sampler
        found = checked(sampler.label, finite_numbers, sampler.attempt(sampler.metrics), "metrics()")
        return {f"sampler/{name}": value for name, value in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for the manifest.

        Raises:
            RunError: If the sampler's state is not JSON.
        """
        sampler = self._sampler
        state = checked(sampler.label, json_object, sampler.attempt(sampler.state_dict), "state_dict()")
        ended = {result.ordinal for result in self._results}
        return {
            "tasks": len(self.tasks),
            "drawn": self._drawn,
            "chosen": {str(ordinal): at for ordinal, at in self._chosen.items() if ordinal not in ended},
            "results": [asdict(result) for result in self._results],
            "sampler": state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from the manifest."""
        check_same_tasks(state.get("tasks"), len(self.tasks))
        self._drawn = state["drawn"]
        self._results = [GroupResult(**one | {"rewards": tuple(one["rewards"])}) for one in state["results"]]
        self._chosen = {int(ordinal): position for ordinal, position in state["chosen"].items()}
        self._chosen |= {result.ordinal: result.position for result in self._results}
        self._sampler.attempt(self._sampler.load_state_dict, state["sampler"])
