"""What a run is after some of its events, and how a line is held against that."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from rllm_core.config import TrainingConfig
from rllm_core.training.books import ACCOUNTS
from rllm_core.training.verification.findings import Verification
from rllm_core.training.verification.records import Block, Group, Snapshot


class RunState:
    """The state of a run, and what every other file has to say of it.

    Args:
        training: The run's ``[training]``.
        left_out: Reasons to end with that keep a rollout out of training.
        found: Where problems go.

    Attributes:
        groups: Dispatched and neither trained nor given up, by ordinal.
        blocks: What ``trajectories.jsonl`` consists of.
        validations: As `summary.json` has to list them.
        snapshots: What manifests have to say, by step.
        quarantined: Tasks the run goes on without, with what went wrong.
        retries: Attempts beyond the first.
        resumed_from: Step of the checkpoint that the last start went on from; None for the beginning.
        is_current: Whether the last start wrote what this version writes.
    """

    def __init__(self, training: TrainingConfig, left_out: frozenset[str], found: Verification) -> None:
        self.training = training
        self.found = found
        self.groups: dict[int, Group] = {}
        self.blocks: list[Block] = []
        self.validations: list[dict[str, Any]] = []
        self.snapshots: dict[int, Snapshot] = {}
        self.quarantined: dict[str, str] = {}
        self.dispatched = 0
        self.retries = 0
        self.resumed_from: int | None = None
        self.is_current = False
        self._left_out = left_out
        self._wanted: int | None = None
        self._again: set[int] = set()  # given up, to be dispatched once more
        self._next_ordinal = 0
        self._running: dict[str, tuple[int, int]] = {}
        self._finished: tuple[str, str] | None = None  # rollout and task of the line before
        self._started: set[str] = set()
        self._failed: dict[str, str] = {}  # by rollout, the task whose error line is due now
        self._errors: set[str] = set()  # of validations, since the one before
        self._filtered: Counter[str | None] = Counter()  # since the step before, by the share they count for
        self._lost: Counter[str] = Counter()  # groups of a task that failures took, one after the other
        self._epoch = -1
        self._is_doubted = False  # the version that is live
        self._consumed = self._consumed_in_window = 0
        self._synced_step = 0
        self._awaits_sync = False  # after a begin
        self._books: dict[str, Counter[str]] = {account: Counter() for account in ACCOUNTS}
        self._number = 0
        self._max_age = math.ceil(training.staleness_threshold) if training.staleness == "strict" else None

    def ended(self) -> None:
        """After the last line."""
        self.found.books = {account: dict(sorted(reasons.items())) for account, reasons in self._books.items()}

    @property
    def books_by_reason(self) -> dict[str, dict[str, int]]:
        """Accounts that are not empty."""
        return {account: dict(reasons) for account, reasons in self._books.items() if reasons}

    def _problem(self, what: str) -> None:
        self.found.problem(f"events.jsonl line {self._number}: {what}")

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            self._problem(what)

    def _check_live(self, holds: bool, what: str, event: dict[str, Any]) -> None:
        """Versions go with the one that is live; once per synchronisation, for where that is missing none does."""
        if not holds and not self._is_doubted:
            self._is_doubted = True
            self._problem(f"{what} says weight_version {event['weight_version']}, {self.found.weight_version} is live")

    def _compare(self, event: dict[str, Any], **expected: Any) -> None:
        """Fields of this event that follow from those before it."""
        self.found.compare(f"events.jsonl line {self._number}: {event['event']}", event, expected, "the lines before")

    def _give_up(self, ordinals: list[int], reason: str) -> None:
        for ordinal in ordinals:
            group = self.groups.pop(ordinal)
            self._books["cancelled"][reason] += group.rollouts
            self._again.add(ordinal)

    def _expect(self, ordinal: int, state: str, becomes: str) -> Group | None:
        group = self.groups.get(ordinal)
        if group is None or group.state != state:
            is_now = "not in flight" if group is None else group.state
            self._problem(f"group {ordinal} should be {state} to become {becomes}, and is {is_now}")
            return None
        group.state = becomes
        return group
