"""Orderly ways to stop a run, with a checkpoint, before its planned steps are done."""

from __future__ import annotations

from rllm_core.errors import UserError


class Interrupted(UserError):
    """A signal, or the budget, stopped the run after it saved a checkpoint."""

    label = ""  # not an error of the run
    by = "signal"

    def __init__(self, signal_number: int, signal_name: str) -> None:
        super().__init__(f"interrupted by {signal_name}")
        self.exit_code = 128 + signal_number


class BudgetSpent(Interrupted):
    """The budget in the run file does not cover any more rollouts."""

    by = "budget"

    def __init__(self, message: str) -> None:
        UserError.__init__(self, message)
        self.exit_code = 3
