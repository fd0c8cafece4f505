"""Records whole groups of a run: some from each optimizer step and validation, and some for each filter reason.

Single rollouts would not explain a run, because an advantage compares a rollout with the others of its task. Of each
step, ``training.groups_kept_per_step`` groups are recorded, chosen by rules that take turns
(`rllm_core.run_folder.groups.chosen`); of the groups with the same filter reason, the 1st, 2nd, 4th, 8th and so on; of
each validation, the same evenly spaced tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic_core import to_json

from rllm_core.algorithms.grouping import FilterReason
from rllm_core.algorithms.samples import per_step, trained_segments
from rllm_core.assembly.algorithm import Algorithm
from rllm_core.backend import TokenMeasures
from rllm_core.config import RunConfig
from rllm_core.errors import RunError
from rllm_core.parser import BaseParser
from rllm_core.run_folder.folder import RunDir
from rllm_core.run_folder.groups import PerStep, RecordedGroup, RecordedRollout, chosen
from rllm_core.run_folder.recorded import GROUPS, INDEX, TIMINGS, IndexedGroup
from rllm_core.run_folder.token_texts import TokenTexts
from rllm_core.scope import CallTimes
from rllm_core.training.group import Group
from rllm_core.training.rollouts import Rollout
from rllm_core.types import Episode, Floats, Task, TrainingSample

VALIDATION_TASKS = 4
"""Tasks recorded per validation, for each group that ``training.groups_kept_per_step`` records per step."""

_NOTHING = TokenMeasures()

Measured = Mapping[str, Sequence[Floats | None]]
"""``(sampled_tokens,)`` values for each sample of a group, by a name in `rllm_core.run_folder.groups.MEASURES`."""


class Recording:
    """Chooses the groups to record, and writes them.

    Args:
        task_of: Function from the position in the task stream to the task.
        parser: Parser of the engine, which knows the text of tokens; None if there is none.
    """

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        run_dir: RunDir,
        task_of: Callable[[int], Task],
        parser: BaseParser | None,
        note: Callable[[str], None],
    ) -> None:
        self._groups = config.training.groups_kept_per_step
        self._left_out = frozenset(config.algorithm.filter_termination_reasons)
        self._estimators = algorithm.estimators
        self._lines = run_dir.lines
        self._task_of = task_of
        self._texts = TokenTexts(run_dir, parser, note)
        self._not_trained: Counter[str] = Counter()

    def state_dict(self) -> dict[str, int]:
        """Returns the number of untrained groups by reason, for the manifest."""
        return dict(self._not_trained)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores the state from the manifest."""
        self._not_trained = Counter(state)

    def filtered(self, group: Group, reason: FilterReason, *, step: int) -> None:
        """Records a group that is not trained, if it is the 1st, 2nd, 4th, 8th ... with this reason.

        ``step`` is the number of optimizer steps done.
        """
        if not self._groups:
            return
        failed = [episode for episode in group.episodes if not episode.trajectories]
        outcome, why = "filtered", reason.value
        if reason is FilterReason.INCOMPLETE_GROUP and failed:
            outcome, why = "failed", failed[0].termination_reason.value
        self._not_trained[why] += 1
        if self._not_trained[why].bit_count() > 1:  # not a power of two
            return
        rollouts = [_not_trained(episode, reason) for episode in group.episodes]
        self._record(group, rollouts, step=step, kept="example", outcome=outcome, reason=why)

    def trained(
        self,
        consumed: Sequence[Group],
        samples: Iterable[TrainingSample],
        corrections: Mapping[str, Floats],
        computed: Mapping[str, TokenMeasures],
        *,
        step: int,
    ) -> list[RecordedGroup]:
        """Records some groups of an optimizer step, and returns them.

        ``corrections``, which are ``(sampled_tokens,)`` weights, and ``computed``, from the backend, are by sample id.

        Raises:
            RunError: If the backend's values do not fit a recorded sample.
        """
        if not self._groups:
            return []
        trained = []
        for group in consumed:
            if group.filtered is None:
                trained.append(group)
            else:
                self.filtered(group, group.filtered, step=step)
        taken = chosen(lambda position: _rewards(trained[position]), len(trained), self._groups, step - 1)
        selected = [(trained[position], rule) for position, rule in taken]
        of_group: dict[int, list[TrainingSample]] = {group.ordinal: [] for group, _ in selected}
        for sample in samples:
            if sample.group_id in of_group:
                of_group[sample.group_id].append(sample)
        recorded = []
        for group, rule in selected:
            rollouts = self._trained_rollouts(group, _measured(of_group[group.ordinal], corrections, computed))
            one = self._record(group, rollouts, step=step, kept=rule, outcome="trained", reason="trained")
            recorded.append(one)
        return recorded

    def validated(self, rollouts: Sequence[tuple[Task, Rollout]], *, step: int) -> None:
        """Records the rollouts of some tasks of a validation."""
        of_task: dict[str, list[tuple[Task, Rollout]]] = {}
        for task, rollout in rollouts:
            of_task.setdefault(task.task_id, []).append((task, rollout))
        tasks = list(of_task.values())
        wanted = min(VALIDATION_TASKS * self._groups, len(tasks))
        for number in range(wanted):
            found = tasks[number * len(tasks) // wanted]
            episodes = [rollout.episode for _, rollout in found]
            versions = [e.weight_version for e in episodes if e.weight_version is not None]
            self._write(
                RecordedGroup(
                    step=step,
                    group=None,
                    task=found[0][0],
                    kept="validation",
                    outcome="validation",
                    reason="validation",
                    weight_version=min(versions, default=None),
                    rollouts=[_validated(episode) for episode in episodes],
                ),
                {rollout.episode.rollout_index: rollout.calls for _, rollout in found if rollout.calls is not None},
            )

    def _trained_rollouts(self, group: Group, measured: Measured) -> list[RecordedRollout]:
        """Returns the rollouts of a trained group with the values of their steps."""
        numbers: dict[int, list[PerStep]] = {}  # of each name, by identity of the trajectory
        start = 0
        for of_role in group.groups:
            written = self._estimators.of(of_role.role).learns_written
            for trajectory in of_role.trajectories:
                segments = trained_segments(trajectory, learns_written=written)
                stop = start + len(segments)
                numbers[id(trajectory)] = [
                    per_step(trajectory, segments, values[start:stop]) for values in measured.values()
                ]
                start = stop
        return [
            RecordedRollout(episode, "filtered", FilterReason.UNSCORED.value)
            if episode.rollout_index in group.unscored
            else self._trained_rollout(episode, numbers, list(measured))
            for episode in group.episodes
        ]

    def _trained_rollout(
        self, episode: Episode, numbers: Mapping[int, Sequence[PerStep]], names: Sequence[str]
    ) -> RecordedRollout:
        if episode.termination_reason in self._left_out:
            return RecordedRollout(episode, "filtered", FilterReason.TERMINATION_REASON.value)
        trajectories = [
            numbers.get(id(trajectory)) or [[None] * len(trajectory.steps)] * len(names)
            for trajectory in episode.trajectories
        ]
        of_names = {name: [each[at] for each in trajectories] for at, name in enumerate(names)}
        return RecordedRollout(episode, "trained", "trained", **of_names)

    def _record(self, group: Group, rollouts: Sequence[RecordedRollout], **about: Any) -> RecordedGroup:
        recorded = RecordedGroup(
            group=group.ordinal,
            task=self._task_of(group.ordinal),
            weight_version=group.weight_version,
            rollouts=rollouts,
            **about,
        )
        self._write(recorded, group.calls)
        return recorded

    def _write(self, group: RecordedGroup, calls: Mapping[int, CallTimes]) -> None:
        line, groups = group.to_json(), self._lines[GROUPS]
        offset = groups.size
        groups.write_text(line)
        self._lines[INDEX].write_text(_line(IndexedGroup.of(group, offset, groups.size - offset - 1).to_json()))
        episodes = [rollout.episode for rollout in group.rollouts]
        timings = [
            _line({"rollout": episode.rollout_id} | calls[episode.rollout_index].to_dict())
            for episode in episodes
            if episode.rollout_index in calls
        ]
        if timings:
            self._lines[TIMINGS].write_text("\n".join(timings))
        self._texts.write(episodes)


def _line(record: dict[str, Any]) -> str:
    return to_json(record).decode()  # a tenth of the time of `json`, which is most of that of a short line


def _rewards(group: Group) -> list[float]:
    return [reward for of_role in group.rewards for reward in of_role if reward is not None]


def _measured(
    samples: Sequence[TrainingSample], corrections: Mapping[str, Floats], computed: Mapping[str, TokenMeasures]
) -> Measured:
    of_backend = [computed.get(sample.sample_id, _NOTHING) for sample in samples]
    if computed:
        _check(samples, of_backend)
    found: dict[str, Sequence[Floats | None]] = {
        "advantages": [sample.advantages for sample in samples],
        "corrections": [corrections.get(sample.sample_id) for sample in samples] if corrections else [],
        "trainer_logprobs": [  # or the log-probabilities that the core requested for the loss or the corrections
            sample.proximal_logprobs if each.logprobs is None else each.logprobs
            for sample, each in zip(samples, of_backend, strict=True)
        ],
        "entropies": [each.entropies for each in of_backend],
    }
    known = {name: values for name, values in found.items() if any(each is not None for each in values)}
    return {"advantages": [], **known}


def _check(samples: Sequence[TrainingSample], of_backend: Sequence[TokenMeasures]) -> None:
    reported = [
        (what, values, len(sample.advantages))
        for sample, each in zip(samples, of_backend, strict=True)
        for what, values in (("trainer logprobs", each.logprobs), ("entropies", each.entropies))
        if values is not None
    ]
    if reported and not _fit(reported):  # all at once: numpy takes as long for one sample as for a group
        what, values, tokens = next(one for one in reported if not _fit([one]))
        raise RunError(
            f"update_policy of the backend returned {len(values)} {what} for a sample with {tokens} sampled tokens, or "
            "some that are not finite"
        )


def _fit(reported: Sequence[tuple[str, Floats, int]]) -> bool:
    """Whether values are finite numbers, one for each token."""
    if any(len(values) != tokens for _, values, tokens in reported):
        return False
    numbers = np.concatenate([values for _, values, _ in reported])
    return bool(np.count_nonzero(np.isfinite(numbers)) == len(numbers))


def _validated(episode: Episode) -> RecordedRollout:
    reason = episode.termination_reason.value
    return RecordedRollout(episode, *(("validation", "validation") if episode.trajectories else ("failed", reason)))


def _not_trained(episode: Episode, reason: FilterReason) -> RecordedRollout:
    if not episode.trajectories:
        return RecordedRollout(episode, "failed", episode.termination_reason.value)
    return RecordedRollout(episode, "filtered", reason.value)
