"""The result of a check, and the comparison of two values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_PROBLEMS = 100
# Summing in another order changes a few units in the last place; a changed number differs by far more.
RELATIVE_TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 1e-5


@dataclass
class Verification:
    """The result of a check.

    Attributes:
        problems: Violations, each with its file and its line or field; limited to 100.
        status: Status of the run from ``summary.json``; ``interrupted`` if the file is missing after a kill.
        books: Number of rollouts by outcome and reason, from the journal.
        steps: Number of optimizer steps.
        planned_steps: Planned number of optimizer steps.
        weight_version: The last weight version.
        incarnations: Number of launches.
        max_lead: Largest number of groups that were outstanding or consumed within a sync window.
        max_staleness: Largest staleness of a group when it was consumed, in weight versions.
        events: Number of lines in the journal.
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
        """Whether no problem was found."""
        return not self.problems

    def problem(self, what: str) -> None:
        """Adds a problem, up to `MAX_PROBLEMS`."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(what)

    def compare(self, place: str, said: Any, expected: Mapping[str, Any], source: str = "events.jsonl") -> None:
        """Compares fields of a JSON object with the values expected from another file.

        Args:
            place: File and line of the object.
            said: The object.
            expected: Expected values by field. None means null or absent; a dot separates the keys of nested objects.
            source: The other file.
        """
        for name, value in expected.items():
            found = said
            for key in name.split("."):
                found = found.get(key) if isinstance(found, Mapping) else None
            if not same(found, value):
                self.problem(f"{place} has {name} {found}, expected {value} from {source}")


def same(said: Any, expected: Any, tolerance: float = RELATIVE_TOLERANCE) -> bool:
    """Whether two JSON values are equal; numbers, up to the rounding of their sums."""
    if isinstance(said, bool) or isinstance(expected, bool):
        return said is expected
    if isinstance(said, int | float) and isinstance(expected, int | float):
        return said == expected or math.isclose(said, expected, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(said, Mapping) and isinstance(expected, Mapping):
        return said.keys() == expected.keys() and all(same(said[key], expected[key], tolerance) for key in said)
    if isinstance(said, list) and isinstance(expected, list):
        return len(said) == len(expected) and all(same(*pair, tolerance) for pair in zip(said, expected, strict=True))
    return bool(said == expected)
