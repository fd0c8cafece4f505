"""Handling of repeated failures: outages stop the run, and tasks that always fail are quarantined."""

from __future__ import annotations

import sys
from collections import Counter, deque
from typing import Any

from rllm_core.config import RolloutConfig
from rllm_core.errors import RunError
from rllm_core.types import Episode

FAILURE_SHARE_WINDOW = 1000
MAX_ERROR_CHARACTERS = 500


class CircuitBreaker:
    """Stops a run after too many consecutive failures, or too many among the last 1000 attempts."""

    def __init__(self, config: RolloutConfig) -> None:
        self._max_consecutive = config.max_consecutive_failures
        self._max_share = config.max_failure_share
        self._consecutive = 0
        self._recent: deque[bool] = deque(maxlen=FAILURE_SHARE_WINDOW)
        self._recent_failures = 0
        self._reasons: Counter[str] = Counter()

    def record(self, episode: Episode) -> RunError | None:
        """Records an attempt; returns, once, the error to stop the run with if a limit is exceeded now."""
        error = self._judge(episode)
        if error is not None:
            self._max_consecutive, self._max_share = sys.maxsize, 1.0
        return error

    def _judge(self, episode: Episode) -> RunError | None:
        failed = episode.termination_reason.is_failure
        if len(self._recent) == FAILURE_SHARE_WINDOW:
            self._recent_failures -= self._recent[0]
        self._recent.append(failed)
        self._recent_failures += failed
        if not failed:
            self._consecutive = 0
            self._reasons.clear()
            return None
        self._consecutive += 1
        self._reasons[episode.termination_reason.value] += 1
        if self._consecutive >= self._max_consecutive:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._reasons.most_common())
            return RunError(
                f"{self._consecutive} consecutive rollout attempts failed ({reasons}; "
                f"rollout.max_consecutive_failures = {self._max_consecutive}); the last one, of task "
                f"{episode.task_id!r}: {_one_line(episode.error)}"
            )
        if len(self._recent) == FAILURE_SHARE_WINDOW and self._recent_failures > self._max_share * FAILURE_SHARE_WINDOW:
            return RunError(
                f"{self._recent_failures} of the last {FAILURE_SHARE_WINDOW} rollout attempts failed "
                f"(rollout.max_failure_share = {self._max_share}); the last one, of task {episode.task_id!r}: "
                f"{_one_line(episode.error)}"
            )
        return None


class Quarantine:
    """Tasks whose groups failed repeatedly; the run continues without them.

    Args:
        after_groups: Consecutive failed groups after which a task is quarantined.

    Attributes:
        tasks: Last error by task id.
    """

    def __init__(self, after_groups: int) -> None:
        self.after_groups = after_groups
        self.tasks: dict[str, str] = {}
        self._lost: Counter[str] = Counter()

    def __contains__(self, task_id: str) -> bool:
        return task_id in self.tasks

    def group_lost(self, task_id: str, error: str) -> bool:
        """Records a group with failed rollouts; returns True if its task is quarantined now."""
        self._lost[task_id] += 1
        if task_id in self.tasks or self._lost[task_id] < self.after_groups:
            return False
        self.tasks[task_id] = error
        return True

    def group_played(self, task_id: str) -> None:
        """Records a group whose rollouts all succeeded."""
        self._lost.pop(task_id, None)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for the manifest."""
        return {"tasks": dict(self.tasks), "lost": dict(self._lost)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from the manifest."""
        self.tasks, self._lost = dict(state["tasks"]), Counter(state["lost"])


def _one_line(error: str | None) -> str:
    return " ".join((error or "").split())[:MAX_ERROR_CHARACTERS]
