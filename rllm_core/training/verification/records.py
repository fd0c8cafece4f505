"""What the replay remembers of a run: rollouts, groups, optimizer steps, validations and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Of `rllm_core.types.TerminationReason`: rollouts that ended so are never trained.
FAILURES = frozenset({"timeout", "engine_error", "error", "cancelled"})


@dataclass(frozen=True, slots=True)
class Part:
    """A trajectory, as the end of its rollout told it."""

    role: str
    reward: float | None
    turns: int
    tokens: int
    weight_version: int | None

    @classmethod
    def read(cls, written: dict[str, Any]) -> Part:
        """From an event."""
        return cls(**{name: written[name] for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt at a rollout ended; ``parts`` is None in runs of earlier versions, which did not write them."""

    rollout: str
    reason: str
    weight_version: int | None
    is_correct: bool | None
    parts: list[Part] | None

    @classmethod
    def read(cls, written: dict[str, Any]) -> Outcome:
        """From an event."""
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
        """Whether it says nothing about the policy."""
        return self.reason in FAILURES


@dataclass
class Group:
    """The rollouts of one task; ``members`` are the trajectories that training gets, by group, index and place."""

    ordinal: int
    task: str
    epoch: int | None
    rollouts: int
    dispatched_version: int
    attempts: dict[int, int] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    state: str = "dispatched"
    weight_version: int = 0
    left_out: int = 0
    filtered: str | None = None
    members: dict[str, list[tuple[int, int]]] | None = None

    @property
    def ended_well(self) -> list[Outcome]:
        """Of its rollouts, by index."""
        return [self.outcomes[index] for index in sorted(self.outcomes) if not self.outcomes[index].has_failed]


@dataclass(frozen=True, slots=True)
class Rollout:
    """An episode that may be in ``trajectories.jsonl``; ``task`` and ``index`` are None where no event tells them."""

    outcome: Outcome
    task: str | None = None
    index: int | None = None


@dataclass
class Block:
    """What an optimizer step or a validation adds to ``trajectories.jsonl``.

    Attributes:
        step: As it stands there.
        is_validation: Which of the two it is.
        total: Episodes of which some are kept.
        wanted: How many at most; None where no event tells.
        episodes: In their order; None where no event tells.
        expected: Metrics of the step, as far as events tell.
        counted: See `measures.counted_places`.
        of_episodes: Metrics, as far as its episodes tell them.
    """

    step: int
    is_validation: bool
    total: int
    wanted: int | None
    episodes: list[Rollout] | None
    expected: dict[str, Any]
    counted: dict[str, dict[int, bool]] | None = None
    of_episodes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Snapshot:
    """The run at the moment a checkpoint was saved: what its manifest has to say.

    Attributes:
        expected: Fields of the manifest.
        due: Groups that were neither trained nor filtered.
        complete: Of these, those that waited to be trained.
        size: Rollouts of a group.
        blocks: Blocks written to ``trajectories.jsonl`` by then.
        epoch: Of the last group dispatched; None where no event tells.
    """

    expected: dict[str, Any]
    due: set[int]
    complete: set[int]
    size: int
    blocks: int
    epoch: int | None
