"""Conversations of one to three turns about the starter task, as a file of rows."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LETTERS = "abcdefgh"


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of workflow ``sft``, each with different letters; a third have a system message."""
    generator = random.Random(seed)
    rows = []
    for number in range(count):
        messages = [{"role": "system", "content": "Be brief."}] if number % 3 == 0 else []
        for _ in range(1 + number % 3):
            letters = [generator.choice(LETTERS) for _ in range(generator.randint(3, 7))]
            messages.append({"role": "user", "content": f"sort: {''.join(letters)}"})
            messages.append({"role": "assistant", "content": "".join(sorted(letters))})
        rows.append({"messages": messages})
    return rows


def written(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Writes rows to ``path``, as JSON lines or Parquet depending on its suffix, and returns it."""
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
