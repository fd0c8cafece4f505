"""Costs of a run: calls, tokens and seconds by kind. Any code in a run can report its own costs with `spend`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from operator import index
from typing import Any

from rllm_core.config import CostsConfig


@dataclass(slots=True)
class Spent:
    """Amounts of one kind.

    Attributes:
        calls: Number of calls, including those without an answer.
        unmetered: Number of these calls whose tokens are unknown: they failed, were cancelled, or reported no tokens.
        prompt_tokens: Tokens sent to the model.
        completion_tokens: Tokens received from the model.
        seconds: Total duration of the calls; concurrent calls add up.
    """

    calls: int = 0
    unmetered: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the amounts that are not 0, for files; seconds in whole microseconds."""
        amounts = (self.calls, self.unmetered, self.prompt_tokens, self.completion_tokens, round(self.seconds, 6))
        return {name: amount for name, amount in zip(self.__slots__, amounts, strict=True) if amount}


class Tally:
    """Amounts by kind. Every addition also counts immediately in the tally that this one is a part of.

    Args:
        whole: Tally that this one is a part of, or None.

    Attributes:
        kinds: Amounts by kind.
        after_close: Receives amounts added after `close`, for example by a call that ends late; None before `close`.
    """

    __slots__ = ("after_close", "kinds", "whole")

    def __init__(self, whole: Tally | None = None) -> None:
        self.whole = whole
        self.kinds: dict[str, Spent] = {}
        self.after_close: Callable[[Tally], None] | None = None

    def add(
        self,
        kind: str,
        calls: int = 0,
        prompt_tokens: int = 0,
        completion_tokens: int = 0,
        seconds: float = 0.0,
        *,
        unmetered: int = 0,
    ) -> None:
        """Adds amounts; see `Spent`."""
        spent = self.kinds.get(kind)
        if spent is None:
            spent = self.kinds[kind] = Spent()
        spent.calls += calls
        spent.unmetered += unmetered
        spent.prompt_tokens += prompt_tokens
        spent.completion_tokens += completion_tokens
        spent.seconds += seconds
        if self.whole is not None:
            self.whole.add(kind, calls, prompt_tokens, completion_tokens, seconds, unmetered=unmetered)
        if self.after_close is not None:
            late = Tally()
            late.add(kind, calls, prompt_tokens, completion_tokens, seconds, unmetered=unmetered)
            self.after_close(late)

    def add_all(self, kinds: Mapping[str, Mapping[str, Any]]) -> None:
        """Adds amounts from the result of `to_dict`."""
        for kind, amounts in kinds.items():
            self.add(kind, **amounts)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the amounts by kind, for files."""
        kinds = {kind: spent.to_dict() for kind, spent in self.kinds.items()}
        return {kind: amounts for kind, amounts in kinds.items() if amounts}

    def close(self, **of: Any) -> None:
        """Writes the amounts to the cost records of the run, if there are any; ``of`` identifies their source."""
        book: Tally = self
        while book.whole is not None:
            book = book.whole
        book.write(self, of)
        self.after_close = lambda late: book.write(late, of)

    def write(self, tally: Tally, of: Mapping[str, Any]) -> None:
        """Writes a part's amounts to the run's cost records. Does nothing here: only the run's tally has records."""


SAMPLING, JUDGE, TEACHER, TOOLS, REWARDS = "sampling", "judge", "teacher", "tools", "rewards"
TRAINING, LOGPROBS = "training", "logprobs"
KINDS = (SAMPLING, JUDGE, TEACHER, TOOLS, REWARDS, TRAINING, LOGPROBS)
TRAINER_KINDS = (TRAINING, LOGPROBS)
"""Kinds of the trainer's costs, which do not count toward a budget of tokens or calls."""

_current: ContextVar[Tally | None] = ContextVar("tally", default=None)
_outside = Tally()


def current() -> Tally | None:
    """Returns the tally of the rollout, group or run in progress."""
    return _current.get()


class collecting:
    """Lets `spend` add to ``tally`` in this task, and in tasks that it starts."""

    __slots__ = ("_tally", "_token")

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def __enter__(self) -> Tally:
        self._token = _current.set(self._tally)
        return self._tally

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def spend(
    kind: str,
    *,
    calls: int = 1,
    unmetered: int = 0,
    prompt_tokens: int = 0,
    completion_tokens: int = 0,
    seconds: float = 0.0,
) -> None:
    """Reports costs of a rollout, a reward function or a scorer, other than sampling from the policy.

    The amounts belong to the rollout or group in progress. Report each call once, even if it failed: then with
    ``unmetered=1``, since its tokens are unknown.

    Args:
        kind: Kind of cost, such as ``judge``; ``[costs.prices]`` sets prices by kind.
        calls: Number of calls, including those without an answer.
        unmetered: Number of these calls whose tokens are unknown.
        prompt_tokens: Tokens sent to the model.
        completion_tokens: Tokens received from the model.
        seconds: Duration of the calls.

    Raises:
        ValueError: If ``kind`` is not text, an amount is not a number from 0 on, or there are more unmetered calls than
            calls.
    """
    if not isinstance(kind, str):
        raise ValueError(f"spend({kind!r:.80}): the kind of cost must be text")
    given: dict[str, float] = {"calls": calls, "unmetered": unmetered, "prompt_tokens": prompt_tokens}
    given |= {"completion_tokens": completion_tokens, "seconds": seconds}
    amounts = {name: _amount(kind, name, amount) for name, amount in given.items()}
    if amounts["unmetered"] > amounts["calls"]:
        raise ValueError(f"spend({kind!r}): unmetered = {unmetered} must be at most calls = {calls}")
    (_current.get() or _outside).add(kind, **amounts)


def _amount(kind: str, name: str, given: Any) -> Any:
    """Returns a plain number, which can be added up and recorded, also for one of numpy."""
    try:
        amount = float(given) if name == "seconds" else index(given)
    except (TypeError, ValueError, OverflowError):
        amount = -1
    if not 0 <= amount < 2**63:
        what = "number" if name == "seconds" else "whole number"
        raise ValueError(f"spend({kind!r}): {name} = {given!r:.80} must be a {what} from 0 on")
    return amount


def taken() -> dict[str, dict[str, Any]]:
    """Returns the costs outside rollouts since the last call of this function, for processes that serve calls."""
    spent = _outside.to_dict()
    _outside.kinds.clear()
    return spent


def money_of(kinds: Mapping[str, Spent], config: CostsConfig) -> float | None:
    """Returns the money that the amounts cost; None without prices. Kinds without a price cost nothing."""
    if not config.prices:
        return None
    return math.fsum(_money(spent, kind, config) for kind, spent in kinds.items())


def _money(spent: Spent, kind: str, config: CostsConfig) -> float:
    prices = config.prices.get(kind)
    if prices is None:
        return 0.0
    return (
        spent.prompt_tokens * prices.million_prompt_tokens / 1e6
        + spent.completion_tokens * prices.million_completion_tokens / 1e6
        + spent.calls * prices.thousand_calls / 1e3
        + spent.seconds * prices.hour / 3600
    )


def amounts_of(kinds: Mapping[str, Spent], config: CostsConfig) -> dict[str, float]:
    """Returns the amounts that a budget can limit: ``tokens``, ``calls`` and, with prices, ``money``."""
    counted = [spent for kind, spent in kinds.items() if kind not in TRAINER_KINDS]
    money = money_of(kinds, config)
    return {
        "tokens": sum(spent.prompt_tokens + spent.completion_tokens for spent in counted),
        "calls": sum(spent.calls for spent in counted),
        **({} if money is None else {"money": money}),
    }


def price_notes(config: CostsConfig) -> list[str]:
    """Returns notes for ``--dry-run`` on prices of other kinds than the core's, since a name may be misspelled."""
    return [
        f"costs.prices.{kind} is not the price of a kind of the core ({', '.join(KINDS)}); it applies to what a plugin "
        f"reports as {kind!r}"
        for kind in config.prices
        if kind not in KINDS
    ]
