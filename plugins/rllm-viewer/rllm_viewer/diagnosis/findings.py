"""Follows a run step by step, and keeps the problems that are certain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from shlex import quote
from typing import Any

from rllm_viewer.diagnosis.answers import AnswerCounts
from rllm_viewer.diagnosis.rules import FAILED_SHARE, FIRST_STEPS, MIN_FAILED, RULES, Row, Rule, explains

PAGE = "docs/what-went-wrong.md"
NEVER_SOLVED_STEPS = 30


@dataclass(frozen=True)
class Finding:
    """A problem of a run.

    Attributes:
        name: Its section on the page `PAGE`.
        since_step: First step with the problem; None if it does not depend on a step.
        seen: The observation.
        causes: Usual causes, the most likely first; if several, the metrics cannot distinguish them.
        decides: Command that distinguishes them, with ``RUN`` for the folder; empty for a single cause.
    """

    name: str
    since_step: int | None
    seen: str
    causes: tuple[str, ...]
    decides: str = ""

    def text(self, run: object) -> str:
        """Returns one sentence: the observation, its first step, its causes, and where to read more."""
        since = f" (since step {self.since_step})" if self.since_step is not None else ""
        decides = f". To decide: {self._command(run)}" if self.decides else ""
        return f"{self.seen}{since}. Cause: {'; or '.join(self.causes)}{decides}. See {PAGE}#{self.name}"

    def to_json(self, run: object) -> dict[str, Any]:
        """Returns the fields and the address of the page as JSON data."""
        fields = asdict(self) | {"decides": self._command(run), "page": f"{PAGE}#{self.name}"}
        return fields | {"causes": list(self.causes)}

    def _command(self, run: object) -> str:
        return self.decides.replace("RUN", quote(str(run)))


@dataclass
class _Streak:
    """Counts for how many steps in a row a rule has held or not held."""

    since: int = 0
    held: int = 0
    missed: int = 0
    is_certain: bool = False

    def follow(self, holds: bool, step: int, rule: Rule) -> None:
        if holds:
            self.since = self.since if self.held or self.is_certain else step
            self.held, self.missed = self.held + 1, 0
            self.is_certain = self.is_certain or self.held >= rule.steps
        else:
            self.held, self.missed = 0, self.missed + 1
            self.is_certain = self.is_certain and self.missed < rule.steps


class Diagnosis:
    """Problems of a run so far.

    Args:
        tables: Run file.
        answers: Reads the recorded answers; called when a problem needs them.
    """

    def __init__(self, tables: Mapping[str, Any], answers: Callable[[], AnswerCounts] = AnswerCounts) -> None:
        self.tables = tables
        self._answers = answers
        self._explained: dict[tuple[str, int], Finding] = {}
        self._explaining: dict[str, list[float]] = defaultdict(list)
        self.steps = 0
        self.trained_steps = 0
        self._first: list[Row] = []
        self._streaks = [_Streak() for _ in RULES]
        self._solved: list[float] = []
        self._failed: Finding | None = None
        self._ended: Finding | None = None

    def step(self, metrics: Row) -> None:
        """Processes the metrics of the next optimizer step."""
        self.steps += 1
        step = int(metrics.get("step", self.steps))
        has_gradient = metrics.get("grad_norm", 1.0 - metrics.get("uniform_groups_share", 0.0)) != 0.0
        self.trained_steps += bool(metrics.get("samples", 0.0) and has_gradient)
        for rule, streak in zip(RULES, self._streaks, strict=True):
            streak.follow(rule.holds(metrics, self.tables, self._first), step, rule)
        if len(self._first) < FIRST_STEPS:
            self._first.append(metrics)
        if "solved" in metrics:
            self._solved.append(metrics["solved"])
        for name in filter(explains, metrics):
            self._explaining[name].append(metrics[name])

    def rollouts(self, books: Mapping[str, Mapping[str, int]]) -> None:
        """Processes the number of rollouts so far, by outcome and reason."""
        failed = sum(books.get("failed", {}).values())
        ended = failed + sum(books.get("trained", {}).values()) + sum(books.get("filtered", {}).values())
        self._failed = None
        if failed >= MIN_FAILED and failed >= FAILED_SHARE * ended:
            reason = max(books["failed"], key=lambda name: books["failed"][name])
            self._failed = Finding(
                "rollouts-failing",
                None,
                f"{failed:,} of {ended:,} rollouts failed, most of them with reason {reason!r}",
                ("the workflow, a tool or the reward function raises an error", "a time limit is too short"),
                f"rllm-core show RUN --reason {reason}",
            )

    def end(self, validated: Sequence[float | None]) -> None:
        """Processes the solve rates of all validations once the run has ended."""
        known = [*self._solved, *(value for value in validated if value is not None)]
        if self.steps >= NEVER_SOLVED_STEPS and known and not any(known):
            rule = next(rule for rule in reversed(RULES) if rule.name == "nobody-solves-it")
            self._ended = self._finding(rule, 1)

    @property
    def nothing_trained(self) -> bool:
        """Whether no step of the run so far had a gradient."""
        return self.steps > 0 and self.trained_steps == 0

    @property
    def findings(self) -> list[Finding]:
        """Returns the findings that are certain now, the most informative first, and at most one per name."""
        found = [*self._before()]
        for rule, streak in zip(RULES, self._streaks, strict=True):
            if streak.is_certain:
                found.append(self._finding(rule, streak.since))
        is_cut_off = any(one.name == "answers-cut-off" for one in found)  # explains a solve rate of 0
        found += [one for one in (self._failed, None if is_cut_off else self._ended) if one is not None]
        names = [one.name for one in found]
        return [one for place, one in enumerate(found) if one.name not in names[:place]]

    def _finding(self, rule: Rule, since: int) -> Finding:
        """Explains a problem once, when it becomes certain, from the answers of that time."""
        key = (rule.seen, since)
        if key not in self._explained:
            means = {name: sum(values) / len(values) for name, values in self._explaining.items()}
            cause = rule.explain(self._answers(), means) if rule.explain else None
            seen = f"{rule.seen}; {cause.seen}" if cause and cause.seen else rule.seen
            causes, decides = (cause.causes, cause.decides) if cause else (rule.causes, rule.decides)
            self._explained[key] = Finding(rule.name, since, seen, causes, decides)
        return self._explained[key]

    def _before(self) -> list[Finding]:
        """Returns the findings that follow from the run file alone."""
        steps = self.tables.get("training", {}).get("steps", 0)
        warmup = self.tables.get("optimizer", {}).get("warmup_steps", 0)
        if not steps or warmup < steps:
            return []
        seen = f"the warm-up takes {warmup} steps and the run has {steps}, so the run never reaches its learning rate"
        cause = "optimizer.warmup_steps is too large, or training.steps too small"
        return [Finding("warm-up-longer-than-the-run", None, seen, (cause,))]
