"""The state of a run after some of its events, and the checks of a line against it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from rllm_core.config import TrainingConfig
from rllm_viewer.verify.findings import Verification
from rllm_viewer.verify.groups import ExpectedGroups
from rllm_viewer.verify.records import Block, GroupRecord, Outcome, Snapshot

# Every rollout has one of these outcomes; the names are keys of ``books`` in summary.json.
OUTCOMES = ("trained", "filtered", "failed", "cancelled")


class RunState:
    """The state of a run, and the expected content of its other files.

    Args:
        training: The run's ``[training]``.
        left_out: Termination reasons that exclude a rollout from training.
        found: Receives the problems.

    Attributes:
        groups: Dispatched groups that are neither trained, filtered nor cancelled, by ordinal.
        blocks: Expected blocks of ``trajectories.jsonl``.
        recorded: Expected groups of ``groups.jsonl``.
        validations: Expected validations of ``summary.json``.
        snapshots: Expected manifests, by step.
        quarantined: Error messages of quarantined tasks, by task.
        retries: Number of attempts beyond the first.
        resumed_from: Checkpoint step from which the last launch resumed; None for a fresh run.
        is_current: Whether the last launch wrote all fields that this version writes.
    """

    def __init__(self, training: TrainingConfig, left_out: frozenset[str], found: Verification) -> None:
        self.training = training
        self.found = found
        self.groups: dict[int, GroupRecord] = {}
        self.blocks: list[Block] = []
        self.recorded = ExpectedGroups()
        self.validations: list[dict[str, Any]] = []
        self.snapshots: dict[int, Snapshot] = {}
        self.quarantined: dict[str, str] = {}
        self.dispatched = 0
        self.retries = 0
        self.resumed_from: int | None = None
        self.is_current = False
        self._left_out = left_out
        self._wanted: int | None = None
        self._planned_steps = training.steps
        self._again: set[int] = set()  # cancelled groups that must be dispatched again
        self._next_ordinal = 0
        self._running: dict[str, tuple[int, int]] = {}
        self._finished: tuple[str, str] | None = None  # rollout and task of the previous line
        self._started: set[str] = set()
        self._failed: dict[str, str] = {}  # task by failed rollout whose error line must follow
        self._errors: set[str] = set()  # errors of validation rollouts since the previous validation
        self._filtered: Counter[str | None] = Counter()  # groups since the previous step, by share
        self._lost: Counter[str] = Counter()  # consecutive groups of a task lost to failures
        self._epoch = -1
        self._is_doubted = False  # whether the live version is uncertain
        self._consumed = self._consumed_in_window = 0
        self._synced_step = 0
        self._awaits_sync = False  # after a begin
        self._books: dict[str, Counter[str]] = {account: Counter() for account in OUTCOMES}
        self._number = 0
        self._max_age = math.ceil(training.staleness_threshold) if training.staleness == "strict" else None

    def ended(self) -> None:
        """Finishes the replay after the last line."""
        self.found.books = {account: dict(sorted(reasons.items())) for account, reasons in self._books.items()}

    @property
    def books_by_reason(self) -> dict[str, dict[str, int]]:
        """Number of rollouts by outcome and reason, without empty outcomes."""
        return {account: dict(reasons) for account, reasons in self._books.items() if reasons}

    def _problem(self, what: str) -> None:
        self.found.problem(f"events.jsonl line {self._number}: {what}")

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            self._problem(what)

    def _check_live(self, holds: bool, what: str, event: dict[str, Any]) -> None:
        """Checks a version against the live one; reports once per weight sync, because a missing sync affects all."""
        if not holds and not self._is_doubted:
            self._is_doubted = True
            self._problem(f"{what} has weight_version {event['weight_version']}, live is {self.found.weight_version}")

    def _check_versions(self, outcome: Outcome, event: dict[str, Any]) -> None:
        """Checks that no future version sampled a rollout; older versions may, because engines may have replicas."""
        # An engine may sample with new weights just before the event of the weight sync is written.
        is_syncing = self.training.partial_rollout and self._synced_step < self.found.steps
        live, version = self.found.weight_version + is_syncing, outcome.weight_version
        self._check_live(version is None or version <= live, f"finish of rollout {outcome.rollout}", event)
        for part in outcome.parts or ():
            sampled = part.weight_version
            newest = math.inf if self._is_doubted else live
            if sampled is not None and (version is None or not version <= sampled <= newest):
                self._problem(
                    f"finish of rollout {outcome.rollout} has a trajectory of impossible weight_version {sampled}"
                )

    def _compare(self, event: dict[str, Any], **expected: Any) -> None:
        """Compares fields of this event with the values that follow from earlier events."""
        self.found.compare(f"events.jsonl line {self._number}: {event['event']}", event, expected, "earlier lines")

    def _give_up(self, ordinals: list[int], reason: str) -> None:
        for ordinal in ordinals:
            group = self.groups.pop(ordinal)
            self._books["cancelled"][reason] += group.rollouts
            self._again.add(ordinal)

    def _expect(self, ordinal: int, state: str, becomes: str) -> GroupRecord | None:
        group = self.groups.get(ordinal)
        if group is None or group.state != state:
            is_now = "not in flight" if group is None else group.state
            self._problem(f"group {ordinal} should be {state} to become {becomes}, but is {is_now}")
            return None
        group.state = becomes
        return group
