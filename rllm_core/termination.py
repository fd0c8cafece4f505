"""Why rollouts end."""

from __future__ import annotations

from enum import StrEnum


class TerminationReason(StrEnum):
    """Why a rollout ended. A failure is never a reward: none of its trajectories are trained."""

    DONE = "done"
    MAX_TURNS = "max_turns_exceeded"
    MAX_PROMPT_TOKENS = "max_prompt_tokens_exceeded"
    MAX_RESPONSE_TOKENS = "max_response_tokens_exceeded"
    TIMEOUT = "timeout"
    ENGINE_ERROR = "engine_error"
    ERROR = "error"
    CANCELLED = "cancelled"
    WORKER_LOST = "worker_lost"

    @property
    def is_failure(self) -> bool:
        """Whether the cause was infrastructure, a bug or a cancellation, rather than the policy."""
        reason = TerminationReason
        return self in (reason.TIMEOUT, reason.ENGINE_ERROR, reason.ERROR, reason.CANCELLED, reason.WORKER_LOST)
