"""What a check found, and how two numbers are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_PROBLEMS = 100
# Sums of the same numbers in another order differ by some units in the last place; what was changed, by far more.
RELATIVE_TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 1e-5


@dataclass
class Verification:
    """What a check found.

    Attributes:
        problems: What does not hold, each with the file, and its line or field; at most 100.
        status: How the run ended, as ``summary.json`` says; ``interrupted`` where it says nothing, after a kill.
        books: Rollouts by account, then reason, as the journal tells them.
        steps: Optimizer steps.
        planned_steps: Those that were planned.
        weight_version: The last one.
        incarnations: Starts of the run.
        max_lead: Most groups that were outstanding or consumed within a window.
        max_staleness: Greatest difference between the version live when a group was consumed and its oldest one.
        events: Lines read.
    """

    problems: list[str] = field(default_factory=list)
    status: str = "interrupted"
    books: dict[str, dict[str, int]] = field(default_factory=dict)
    steps: int = 0
    planned_steps: int = 0
    weight_version: int = 0
    incarnations: int = 0
    max_lead: int = 0
    max_staleness: int = 0
    events: int = 0

    @property
    def holds(self) -> bool:
        """Whether nothing was found."""
        return not self.problems

    def problem(self, what: str) -> None:
        """Add one, unless there are too many to read already."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(what)

    def compare(self, place: str, said: Any, expected: Mapping[str, Any], source: str = "events.jsonl") -> None:
        """Hold the fields of a JSON object against what another file makes of them.

        Args:
            place: File and line of the object.
            said: The object.
            expected: Values by field; None is a field that is null or absent, a dot leads into an object within.
            source: The other file.
        """
        for name, value in expected.items():
            found = said
            for key in name.split("."):
                found = found.get(key) if isinstance(found, Mapping) else None
            if not same(found, value):
                self.problem(f"{place} says {name} {found}, {source} {value}")


def same(said: Any, expected: Any, tolerance: float = RELATIVE_TOLERANCE) -> bool:
    """Whether two JSON values are the same, numbers up to the rounding of their sums."""
    if isinstance(said, bool) or isinstance(expected, bool):
        return said is expected
    if isinstance(said, int | float) and isinstance(expected, int | float):
        return said == expected or math.isclose(said, expected, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(said, Mapping) and isinstance(expected, Mapping):
        return said.keys() == expected.keys() and all(same(said[key], expected[key], tolerance) for key in said)
    if isinstance(said, list) and isinstance(expected, list):
        return len(said) == len(expected) and all(same(*pair, tolerance) for pair in zip(said, expected, strict=True))
    return bool(said == expected)
