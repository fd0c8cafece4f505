"""When a run collects young garbage."""

from __future__ import annotations

import gc

# Python collects young garbage only after many more objects were created than freed. If rollouts end as fast as they
# start, this never happens, and garbage piles up until one collection blocks the event loop for 0.1 s.
ANSWERS_PER_COLLECTION = 512


class YoungGarbage:
    """Collects young garbage: between optimizer steps, and after every 512 answers of an engine since the last time."""

    def __init__(self) -> None:
        self._answers = 0

    def answered(self, answers: int) -> None:
        """Counts answers, which leave garbage behind."""
        self._answers += answers
        if self._answers >= ANSWERS_PER_COLLECTION:
            self.collect()

    def collect(self) -> None:
        """Collects now; cheapest when few rollouts are alive, since a collection walks what they hold."""
        self._answers = 0
        gc.collect(1)
