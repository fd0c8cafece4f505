"""The conservation law: every dispatched rollout ends in exactly one of four accounts."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from rllm_core.errors import RunError

Account = Literal["trained", "filtered", "failed", "cancelled"]
ACCOUNTS: tuple[Account, ...] = ("trained", "filtered", "failed", "cancelled")


class Books:
    """Counts rollouts by where they ended, with reasons.

    A retried rollout is one rollout; its attempts are counted separately.
    """

    def __init__(self) -> None:
        self.dispatched = 0
        self.retries = 0
        self._ended: dict[Account, Counter[str]] = {account: Counter() for account in ACCOUNTS}

    def dispatch(self, rollouts: int) -> None:
        """Rollouts have been started."""
        self.dispatched += rollouts

    def book(self, account: Account, reason: str, rollouts: int = 1) -> None:
        """Rollouts have ended; none leave no trace of the reason."""
        if rollouts:
            self._ended[account][reason] += rollouts

    def total(self, account: Account) -> int:
        """Rollouts in an account, over all reasons."""
        return self._ended[account].total()

    @property
    def open(self) -> int:
        """Rollouts dispatched and not yet booked: in flight or buffered."""
        return self.dispatched - sum(self.total(account) for account in ACCOUNTS)

    def check(self, outstanding: int) -> None:
        """Compare with ``outstanding``, the rollouts that the loop knows to be in flight or buffered.

        Raises:
            RunError: If a rollout was lost or counted twice.
        """
        if self.open != outstanding:
            raise RunError(
                "rollout accounting is inconsistent (a bug; please report it with events.jsonl): "
                f"{self.dispatched} started, {self.totals()}, so {self.open} should be outstanding, but "
                f"{outstanding} are"
            )

    def totals(self) -> dict[str, int]:
        """``{dispatched, trained, filtered, failed, cancelled}``."""
        return {"dispatched": self.dispatched, **{account: self.total(account) for account in ACCOUNTS}}

    def by_reason(self) -> dict[str, dict[str, int]]:
        """Rollouts per account and reason."""
        return {account: dict(sorted(self._ended[account].items())) for account in ACCOUNTS if self._ended[account]}

    def state_after_restart(self, kept: int = 0) -> dict[str, Any]:
        """For the manifest: the books as a restart finds them.

        Args:
            kept: Open rollouts that the checkpoint holds; the other open ones are lost with this process.
        """
        ended = {account: dict(reasons) for account, reasons in self.by_reason().items()}
        if self.open > kept:
            cancelled = ended.setdefault("cancelled", {})
            cancelled["restart"] = cancelled.get("restart", 0) + self.open - kept
        return {"dispatched": self.dispatched, "retries": self.retries, "ended": ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the manifest."""
        self.dispatched, self.retries = state["dispatched"], state["retries"]
        for account in ACCOUNTS:
            self._ended[account] = Counter(state["ended"].get(account, {}))
