"""The lines of a run folder's files, with their offsets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllm_viewer.verify.findings import Verification


@dataclass
class Lines:
    """The complete lines of a JSON Lines file.

    Attributes:
        objects: Line number, from 1, and content of each readable line.
        ends: Offset of the end of each line in bytes, starting with 0.
        is_torn: Whether an incomplete line follows, as after a kill.
    """

    name: str
    objects: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])
    is_torn: bool = False

    @classmethod
    def read(cls, path: Path, found: Verification) -> Lines:
        """Reads a small file into memory."""
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
        """Yields complete lines with their numbers; none if the file is missing."""
        if not path.is_file():
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                self.is_torn = not line.endswith(b"\n")
                if not self.is_torn:
                    self.ends.append(self.ends[-1] + len(line))
                    yield number, line
