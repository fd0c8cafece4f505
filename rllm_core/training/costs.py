"""Cost accounting of a run over all its launches, and the budget that ends the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rllm_core.config import CostsConfig
from rllm_core.costs import Tally, amounts_of, money_of
from rllm_core.run_folder.folder import RunDir
from rllm_core.run_folder.journal import read_json_lines
from rllm_core.run_folder.recorded import COSTS


class Costs(Tally):
    """Total costs of a run.

    Every rollout, scored group and optimizer step writes a line to ``costs.jsonl`` when it ends. A resumed launch
    starts from the sum of all earlier lines, including those that moved to ``lost/``.

    Attributes:
        changed: Called after each change, or None.
    """

    __slots__ = ("_lines", "changed", "config")

    def __init__(self, config: CostsConfig, run_dir: RunDir) -> None:
        super().__init__()
        self.config = config
        self.changed: Callable[[], None] | None = None
        self._lines = run_dir.lines[COSTS]
        if run_dir.incarnation:
            for path in (self._lines.path, *run_dir.path.glob(f"lost/*/{COSTS}.jsonl")):
                for line in read_json_lines(path):
                    self.add_all(line["costs"])

    def add(self, kind: str, *amounts: Any, **more: Any) -> None:
        """See `Tally.add`."""
        super().add(kind, *amounts, **more)
        if self.changed is not None:
            self.changed()

    def write(self, tally: Tally, of: Mapping[str, Any]) -> None:
        """Appends a line with the costs in ``tally``; ``of`` identifies their source."""
        if kinds := tally.to_dict():
            self._lines.write({**of, "costs": kinds})

    def amounts(self) -> dict[str, float]:
        """See `amounts_of`."""
        return amounts_of(self.kinds, self.config)

    def summary(self) -> dict[str, Any]:
        """Returns the costs for ``summary.json``."""
        by_kind = {}
        for kind, spent in sorted(self.kinds.items()):
            money = money_of({kind: spent}, self.config) if kind in self.config.prices else None
            by_kind[kind] = spent.to_dict() | ({} if money is None else {"money": money})
        return {**self.amounts(), "by_kind": by_kind, "budget": self.config.budget.model_dump(exclude_none=True)}


class Budget:
    """Decides whether a run can afford to start rollouts.

    A group starts only if the budget covers all rollouts then in progress, each at the cost of the most expensive one
    so far. Until the first group has ended, only one runs at a time.

    Attributes:
        limits: Limits by their keys in the run file.
        dearest: Highest amounts per rollout so far, by the same keys.
        on_spent: Called once, when a limit is exceeded.
    """

    def __init__(self, costs: Costs) -> None:
        limits = costs.config.budget
        self.costs = costs
        self.limits: dict[str, float] = limits.model_dump(exclude_none=True)
        self.dearest: dict[str, float] = {}
        self.on_spent: Callable[[], None] = lambda: None
        self._running = 0
        self._short: list[str] = []  # limits without room for the latest rollouts that were asked for
        self._ended = asyncio.Event()
        self._is_over = False
        if self.limits:
            costs.changed = self._changed

    def fits(self, rollouts: int) -> bool:
        """Whether the budget covers this many rollouts in addition to those in progress."""
        if not self.limits:
            return True
        if self._running and not self.dearest:
            return False
        spent, busy = self.costs.amounts(), self._running + rollouts
        self._short = [
            name
            for name, limit in self.limits.items()
            if spent[name] >= limit or spent[name] + busy * self.dearest.get(name, 0.0) > limit
        ]
        return not self._short

    async def waited(self) -> bool:
        """Waits until some rollouts in progress have ended; returns False if there are none."""
        if not self._running:
            return False
        self._ended.clear()
        await self._ended.wait()
        return True

    def start(self, rollouts: int) -> None:
        """Counts rollouts as in progress."""
        self._running += rollouts

    def end(self, rollouts: int, tally: Tally) -> None:
        """Counts rollouts as ended; ``tally`` is their total cost."""
        self._running -= rollouts
        self._ended.set()
        for name, amount in amounts_of(tally.kinds, self.costs.config).items() if self.limits else ():
            self.dearest[name] = max(self.dearest.get(name, 0.0), amount / rollouts)

    def problem(self) -> str:
        """Explains why the run cannot continue."""
        spent, units = self.costs.amounts(), {"tokens": " tokens", "calls": " calls", "money": ""}
        reached = [name for name, limit in self.limits.items() if spent[name] >= limit]
        name = (reached or self._short)[0]
        said = f"{_number(spent[name])} of {_number(self.limits[name])}{units[name]} are spent"
        said += "" if reached else ", too much to start another group"
        return f"the budget ended the run: {said}. To continue, resume it with a larger costs.budget.{name}"

    def _changed(self) -> None:
        if not self._is_over:
            spent = self.costs.amounts()
            if any(spent[name] > limit for name, limit in self.limits.items()):
                self._is_over = True
                self.on_spent()


def _number(amount: float) -> str:
    return f"{amount:,.0f}" if amount == int(amount) else f"{amount:,.6g}"
