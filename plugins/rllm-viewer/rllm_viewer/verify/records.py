"""Records of the replay: rollouts, groups, optimizer steps, validations and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# Values of `rllm_core.types.TerminationReason`; rollouts that end with them are never trained.
FAILURES = frozenset({"timeout", "engine_error", "error", "cancelled", "worker_lost"})


@dataclass(frozen=True, slots=True)
class Part:
    """A trajectory, from the finish event of its rollout."""

    role: str
    reward: float | None
    turns: int
    tokens: int
    weight_version: int | None

    @classmethod
    def read(cls, written: dict[str, Any]) -> Part:
        """Reads the trajectory from an event."""
        return cls(**{name: written[name] for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a rollout attempt; ``parts`` is None in runs of earlier versions, which did not write them."""

    rollout: str
    reason: str
    weight_version: int | None
    is_correct: bool | None
    parts: list[Part] | None

    @classmethod
    def read(cls, written: dict[str, Any]) -> Outcome:
        """Reads the outcome from an event."""
        parts = written.get("trajectories")
        return cls(
            rollout=written["rollout"],
            reason=written["reason"],
            weight_version=written["weight_version"],
            is_correct=written.get("is_correct"),
            parts=None if parts is None else [Part.read(part) for part in parts],
        )

    @property
    def has_failed(self) -> bool:
        """Whether the attempt failed, and so measures nothing about the policy."""
        return self.reason in FAILURES


@dataclass
class GroupRecord:
    """The rollouts of one task.

    Attributes:
        unscored: Indices of the rollouts that the group scorer could not score.
        members: Trajectories to train, as (index, position) by group name.
    """

    ordinal: int
    task: str
    epoch: int | None
    rollouts: int
    dispatched_version: int
    attempts: dict[int, int] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    state: str = "dispatched"
    weight_version: int = 0
    unscored: set[int] = field(default_factory=set)
    left_out: int = 0
    filtered: str | None = None
    members: dict[str, list[tuple[int, int]]] | None = None

    def score(self, rewards: Mapping[str, float | None]) -> None:
        """Replaces the rewards of the rollouts' ``finish`` events with those of a ``score`` event."""
        for index, outcome in self.outcomes.items():
            if outcome.rollout in rewards:
                reward = rewards[outcome.rollout]
                parts = [replace(part, reward=reward) for part in outcome.parts or ()]
                self.outcomes[index] = replace(outcome, parts=parts)
                if reward is None:
                    self.unscored.add(index)

    @property
    def ended_well(self) -> list[Outcome]:
        """Outcomes of the rollouts that succeeded, by index."""
        return [self.outcomes[index] for index in sorted(self.outcomes) if not self.outcomes[index].has_failed]


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """An episode that may be in ``trajectories.jsonl``; ``task`` and ``index`` are None if no event has them."""

    outcome: Outcome
    task: str | None = None
    index: int | None = None


@dataclass
class Block:
    """The lines that an optimizer step or a validation adds to ``trajectories.jsonl``.

    Attributes:
        step: Value of the field ``step``.
        is_validation: Whether a validation wrote it.
        total: Number of episodes, only some of which are kept.
        wanted: Maximum number of episodes to keep; None if no event records it.
        episodes: The episodes in order; None if no event records them.
        expected: Metrics of the step that follow from events.
        counted: Result of `measures.counted_places`.
        of_episodes: Metrics that follow from the episodes.
    """

    step: int
    is_validation: bool
    total: int
    wanted: int | None
    episodes: list[RolloutRecord] | None
    expected: dict[str, Any]
    counted: dict[str, dict[int, bool]] | None = None
    of_episodes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Snapshot:
    """The state of the run when a checkpoint was saved, to compare with its manifest.

    Attributes:
        expected: Expected fields of the manifest.
        due: Groups that were neither trained nor filtered.
        complete: Groups among these that were waiting to be trained.
        size: Number of rollouts in a group.
        blocks: Number of blocks written to ``trajectories.jsonl`` so far.
        entries: Number of entries of ``groups.jsonl`` so far.
        epoch: Epoch of the last dispatched group; None if no event records it.
    """

    expected: dict[str, Any]
    due: set[int]
    complete: set[int]
    size: int
    blocks: int
    entries: int
    epoch: int | None
