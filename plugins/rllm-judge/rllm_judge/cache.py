"""A judge's replies by the content of their questions, in SQLite: in memory, or in a file that runs share."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rllm_core.errors import ConfigError


class Replies:
    """Stores readable replies. Unreadable ones are not kept, because asking again may help.

    Args:
        file: SQLite file; "" keeps the replies in memory.

    Raises:
        ConfigError: If the file cannot be read or written, or is something else. So do the methods: another attempt
            would pay for another reply.
    """

    def __init__(self, file: str = "") -> None:
        self._file = file
        with self._using():
            self._connection = sqlite3.connect(file or ":memory:", timeout=30.0)
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS replies (question TEXT PRIMARY KEY, reply TEXT NOT NULL)"
            )
            self._connection.execute("INSERT OR REPLACE INTO replies VALUES ('', '')")  # fails if it can only be read
            self._connection.rollback()

    @staticmethod
    def key(*parts: Any) -> str:
        """Returns the key of a question: everything that the reply depends on, as JSON."""
        return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()

    def get(self, key: str) -> str | None:
        """Returns a reply, or None."""
        with self._using():
            found: Sequence[str] | None = self._connection.execute(
                "SELECT reply FROM replies WHERE question = ?", (key,)
            ).fetchone()
        return None if found is None else found[0]

    def put(self, key: str, reply: str) -> None:
        """Stores a reply."""
        with self._using(), self._connection:
            self._connection.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    @contextmanager
    def _using(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise ConfigError(
                f"cache_file = {self._file!r} cannot be used: {error}; name a new file, or one of a run"
            ) from error
