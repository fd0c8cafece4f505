"""The lines of a run folder, each with where it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllm_core.training.verification.findings import Verification


@dataclass
class Lines:
    """The whole lines of a file of JSON objects.

    Attributes:
        objects: Number of the line, from 1, and what it says; lines that say nothing are left out.
        ends: Length of the file up to the end of each line, in bytes; 0 for none.
        is_torn: Whether something without an end follows: a kill may have cut a line off.
    """

    name: str
    objects: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])
    is_torn: bool = False

    @classmethod
    def read(cls, path: Path, found: Verification) -> Lines:
        """A small file, whole."""
        lines = cls(path.name)
        for number, line in lines.raw(path):
            try:
                written = json.loads(line)
                written["step"].__index__()
            except (ValueError, LookupError, TypeError, AttributeError):
                found.problem(f"{path.name} line {number} cannot be read")
            else:
                lines.objects.append((number, written))
        return lines

    def raw(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """Whole lines with their numbers; a file that is not there has none."""
        if not path.is_file():
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                self.is_torn = not line.endswith(b"\n")
                if not self.is_torn:
                    self.ends.append(self.ends[-1] + len(line))
                    yield number, line
