"""Rollout accounting: every rollout that was started has exactly one of four outcomes."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from rllm_core.errors import RunError

Account = Literal["trained", "filtered", "failed", "cancelled"]
ACCOUNTS: tuple[Account, ...] = ("trained", "filtered", "failed", "cancelled")


class Books:
    """Counts rollouts by outcome and reason.

    A retried rollout counts once; retries are counted separately.
    """

    def __init__(self) -> None:
        self.dispatched = 0
        self.retries = 0
        self._ended: dict[Account, Counter[str]] = {account: Counter() for account in ACCOUNTS}

    def dispatch(self, rollouts: int) -> None:
        """Counts rollouts that were started."""
        self.dispatched += rollouts

    def book(self, account: Account, reason: str, rollouts: int = 1) -> None:
        """Counts rollouts that have ended; zero rollouts do not create an entry for the reason."""
        if rollouts:
            self._ended[account][reason] += rollouts

    def total(self, account: Account) -> int:
        """Returns the number of rollouts with an outcome, over all reasons."""
        return self._ended[account].total()

    @property
    def open(self) -> int:
        """Number of rollouts without an outcome so far: in flight or buffered."""
        return self.dispatched - sum(self.total(account) for account in ACCOUNTS)

    def check(self, outstanding: int) -> None:
        """Compares `open` with ``outstanding``, the loop's own count of rollouts in flight or buffered.

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
        """Returns ``{dispatched, trained, filtered, failed, cancelled}``."""
        return {"dispatched": self.dispatched, **{account: self.total(account) for account in ACCOUNTS}}

    def by_reason(self) -> dict[str, dict[str, int]]:
        """Returns the number of rollouts by outcome and reason."""
        return {account: dict(sorted(self._ended[account].items())) for account in ACCOUNTS if self._ended[account]}

    def described(self) -> str:
        """Returns the number of rollouts by outcome and reason, for people."""
        ended = ((account, reasons.items()) for account, reasons in self.by_reason().items())
        return "; ".join(
            f"{account}: {', '.join(f'{why} {count:,}' for why, count in found)}" for account, found in ended
        )

    def state_after_restart(self, kept: int = 0) -> dict[str, Any]:
        """Returns the accounting for the manifest, as a resumed run needs it.

        The checkpoint has ``kept`` open rollouts; the others count as cancelled.
        """
        ended = {account: dict(reasons) for account, reasons in self.by_reason().items()}
        if self.open > kept:
            cancelled = ended.setdefault("cancelled", {})
            cancelled["restart"] = cancelled.get("restart", 0) + self.open - kept
        return {"dispatched": self.dispatched, "retries": self.retries, "ended": ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the accounting from the manifest."""
        self.dispatched, self.retries = state["dispatched"], state["retries"]
        for account in ACCOUNTS:
            self._ended[account] = Counter(state["ended"].get(account, {}))
