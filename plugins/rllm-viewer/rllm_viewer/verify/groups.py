"""Checks ``groups.jsonl``: its groups, their rollouts and numbers, and the files that belong to it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllm_core.run_folder.groups import RecordedGroup, RecordedRollout
from rllm_viewer.verify.episodes import check_episode
from rllm_viewer.verify.findings import Verification
from rllm_viewer.verify.lines import Lines
from rllm_viewer.verify.records import GroupRecord, RolloutRecord

# The rules take turns; see "groups.jsonl" in docs/run-folder.md.
RULES = ("first", "best", "worst", "divided")
VALIDATION_TASKS = 4
# Possible outcomes of rollouts, by the outcome of their group.
OUTCOMES = {
    "trained": ("trained", "filtered"),
    "filtered": ("filtered",),
    "failed": ("failed", "filtered"),
    "validation": ("validation", "failed"),
}


@dataclass(frozen=True)
class EventLines:
    """The lines that an event adds to ``groups.jsonl``: one group, or the groups of a validation.

    Attributes:
        expected: Expected fields of the line.
        rollouts: Rollouts of the group, by id; for a validation, all of its rollouts, only some of which are recorded.
        event: Number of the event, among those that add entries.
        most: Maximum number of lines.
    """

    expected: Mapping[str, Any]
    rollouts: Mapping[str, RolloutRecord]
    event: int
    most: int = 1

    @property
    def is_validation(self) -> bool:
        """Whether the entry belongs to a validation."""
        return bool(self.expected["outcome"] == "validation")


@dataclass
class ExpectedGroups:
    """The entries that follow from the events.

    Attributes:
        per_step: Number of groups to record per step; None if no event has it.
        entries: Entries in order.
    """

    per_step: int | None = None
    entries: list[EventLines] = field(default_factory=list)
    _not_trained: Counter[str] = field(default_factory=Counter)
    _events: int = 0

    @property
    def not_trained(self) -> dict[str, int]:
        """Number of groups that were not trained, by reason."""
        return dict(self._not_trained)

    def filtered(self, group: GroupRecord, reason: str, failed: Mapping[str, int], step: int) -> None:
        """Adds a group of a ``filter`` event."""
        self._events += 1
        self._not_trained_group(group, reason, failed, step)

    def _not_trained_group(self, group: GroupRecord, reason: str, failed: Mapping[str, int], step: int) -> None:
        """Adds an untrained group if it is the 1st, 2nd, 4th, 8th ... with its reason."""
        if not self.per_step:
            return
        is_failed = reason == "incomplete_group" and failed
        why = next(iter(failed)) if is_failed else reason
        self._not_trained[why] += 1
        if math.log2(self._not_trained[why]).is_integer():
            outcome = "failed" if is_failed else "filtered"
            self._add(group, step, kept="example", outcome=outcome, reason=why)

    def trained(self, groups: Sequence[GroupRecord], step: int) -> None:
        """Adds the groups of an optimizer step."""
        self._events += 1
        if not self.per_step:
            return
        for group in groups:
            if group.filtered is not None:
                self._not_trained_group(group, group.filtered, {}, step)
        left = [group for group in groups if group.filtered is None]
        first = (step - 1) * self.per_step
        for number in range(first, first + min(self.per_step, len(left))):
            group, rule = _chosen(left, RULES[number % len(RULES)])
            left.remove(group)
            self._add(group, step, kept=rule, outcome="trained", reason="trained", weight_version=group.weight_version)

    def validated(self, rollouts: Sequence[RolloutRecord], step: int) -> None:
        """Adds a validation."""
        self._events += 1
        if self.per_step:
            expected = {"step": step, "group": None, "kept": "validation", "outcome": "validation"}
            by_id = {rollout.outcome.rollout: rollout for rollout in rollouts}
            self.entries.append(EventLines(expected, by_id, self._events, VALIDATION_TASKS * self.per_step))

    def _add(self, group: GroupRecord, step: int, **expected: Any) -> None:
        rollouts = [RolloutRecord(group.outcomes[index], group.task, index) for index in sorted(group.outcomes)]
        by_id = {rollout.outcome.rollout: rollout for rollout in rollouts}
        self.entries.append(
            EventLines({"step": step, "group": group.ordinal, "task": group.task, **expected}, by_id, self._events)
        )


def _chosen(groups: Sequence[GroupRecord], rule: str) -> tuple[GroupRecord, str]:
    rewards = {group.ordinal: _rewards(group) for group in groups}
    rewarded = [group for group in groups if rewards[group.ordinal]]
    if rule == "first" or not rewarded:
        return groups[0], "first"
    if rule == "divided":
        return max(rewarded, key=lambda group: _variance(rewards[group.ordinal])), rule
    best = max if rule == "best" else min
    return best(rewarded, key=lambda group: _mean(rewards[group.ordinal])), rule


def _rewards(group: GroupRecord) -> list[float]:
    members = [pair for places in (group.members or {}).values() for pair in places]
    parts = [(group.outcomes[index].parts or [])[place] for index, place in members]
    return [part.reward for part in parts if part.reward is not None]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values)


class Groups:
    """Reads the recorded groups in order, and compares each with its entry.

    Attributes:
        lines: The lines of the file.
        ends: Number of lines up to the end of each entry.
        missing: Entries without lines.
    """

    def __init__(self, run_dir: Path, expected: Sequence[EventLines], found: Verification) -> None:
        self.found = found
        self.lines = Lines("groups.jsonl")
        self.index = Lines.read(run_dir / "groups_index.jsonl", found)
        self.ends: list[int] = []
        self._entries = iter(expected)
        self._entry: EventLines | None = next(self._entries, None)
        self._in_entry: list[str] = []  # task of each line of the entry
        self._validated: list[str] | None = None  # tasks of the first validation
        self._ids: set[int] = set()
        self._is_in_order = True
        for number, line in self.lines.raw(run_dir / "groups.jsonl"):
            try:
                self._line(number, RecordedGroup.from_json(line), self._kept(number))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                found.problem(f"groups.jsonl line {number} cannot be read ({type(error).__name__}: {error})")
        self._close_entries(None)
        self.missing = expected[len(self.ends) :]
        more = len(self.index.ends) - len(self.lines.ends)
        if more > 0 and found.status == "completed":
            found.problem(f"groups_index.jsonl has {more} more line(s) than groups.jsonl")
        self._check_texts(run_dir / "tokens.jsonl")

    def _kept(self, number: int) -> dict[str, Any] | None:
        """Returns the index entry of a line, after comparing it with the file itself."""
        if number > len(self.index.objects) and self.found.status != "completed":
            return None  # the run ended between the two lines, or while being resumed
        written = dict(self.index.objects[number - 1][1]) if number <= len(self.index.objects) else {}
        start, end = self.lines.ends[number - 1 : number + 1]
        expected = {"offset": start, "length": end - start - 1}
        self.found.compare(f"groups_index.jsonl line {number}", written, expected, "groups.jsonl")
        return written

    def _line(self, number: int, group: RecordedGroup, indexed: Mapping[str, Any] | None) -> None:
        self._close_entries(group)
        place, entry = f"groups.jsonl line {number}", self._entry
        if entry is None:
            # A kill may lose events whose groups are already in this file.
            if self.found.status != "interrupted" and self._is_in_order:
                self._is_in_order = False
                self.found.problem(f"{place} has step {group.step}, but events.jsonl has no more groups to record")
            return
        said = {
            "step": group.step,
            "group": group.group,
            "task": group.task.task_id,
            "kept": group.kept,
            "outcome": group.outcome,
            "reason": group.reason,
            "weight_version": group.weight_version,
        }
        if self._is_in_order:
            before = len(self.found.problems)
            self.found.compare(place, said, entry.expected)
            self._is_in_order = len(self.found.problems) == before  # later lines would not match either
        if indexed is not None:
            self.found.compare(f"groups_index.jsonl line {number}", indexed, _indexed(group, said), place)
        for rollout in group.rollouts:
            self._rollout(place, rollout, entry)
        if not entry.is_validation and len(group.rollouts) != len(entry.rollouts) and self._is_in_order:
            self.found.problem(f"{place} has {len(group.rollouts)} rollouts, expected {len(entry.rollouts)}")
        self._in_entry.append(group.task.task_id)

    def _rollout(self, place: str, recorded: RecordedRollout, entry: EventLines) -> None:
        episode = recorded.episode
        for trajectory in episode.trajectories:
            for step in trajectory.steps:
                self._ids.update(step.prompt_ids.tolist(), step.completion_ids.tolist())
        rollout = entry.rollouts.get(episode.rollout_id)
        if rollout is not None:
            check_episode(self.found, place, json.loads(episode.to_json()), rollout)
        elif self._is_in_order:
            self.found.problem(f"{place} has rollout {episode.rollout_id}, which does not belong to it")
        allowed = OUTCOMES[entry.expected["outcome"]]
        if recorded.outcome not in allowed and self._is_in_order:
            self.found.problem(
                f"{place} has a rollout with outcome {recorded.outcome}, expected {' or '.join(allowed)} in this group"
            )

    def _close_entries(self, group: RecordedGroup | None) -> None:
        """Ends the current entry, and a validation without lines, if ``group`` does not belong to it."""
        while self._entry is not None:
            entry, lines = self._entry, len(self._in_entry)
            is_over = lines >= entry.most
            if entry.is_validation and lines and not is_over:  # a validation with fewer tasks has fewer lines
                is_over = group is None or group.outcome != "validation" or group.step != entry.expected["step"]
            if not is_over:
                return
            if entry.is_validation:
                expected = self._validated
                if expected is not None and group is None and self.found.status != "completed":
                    expected = expected[:lines]  # the run was killed between two lines
                if expected is not None and expected != self._in_entry and self._is_in_order:
                    self.found.problem(
                        f"groups.jsonl has the tasks {self._in_entry} of the validation of step "
                        f"{entry.expected['step']}, expected {expected} as before"
                    )
                self._validated = self._in_entry
            self.ends.append((self.ends[-1] if self.ends else 0) + lines)
            self._entry, self._in_entry = next(self._entries, None), []

    def _check_texts(self, path: Path) -> None:
        if not path.is_file() or self.found.status != "completed":
            return
        lines = [json.loads(line) for _, line in Lines(path.name).raw(path)]
        missing = self._ids - {line["id"] for line in lines}
        if missing:
            self.found.problem(f"tokens.jsonl lacks the token id {min(missing)}, which groups.jsonl has")


def _indexed(group: RecordedGroup, said: Mapping[str, Any]) -> dict[str, Any]:
    rewards = []
    for rollout in group.rollouts:
        of_episode = [t.total_reward for t in rollout.episode.trajectories if t.trainable and t.has_reward]
        rewards.append(_mean(of_episode) if of_episode else None)
    solved = [rollout.episode.is_correct for rollout in group.rollouts]
    fields = {name: value for name, value in said.items() if name != "weight_version"}
    return {**fields, "rewards": rewards, "solved": solved}
