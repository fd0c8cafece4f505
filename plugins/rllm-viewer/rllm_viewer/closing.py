"""The closing lines of a run: its result, its best and worst answer, what went wrong, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from rllm_core.costs import SAMPLING
from rllm_core.errors import ConfigError, RunError
from rllm_core.run_folder.answers_table import question_and_answer
from rllm_core.run_folder.groups import RecordedRollout
from rllm_core.run_folder.recorded import IndexedGroup, group_at
from rllm_viewer import diagnosis, recordings
from rllm_viewer.results import result_of
from rllm_viewer.terminal import fitted, number, quoted, share, sparkline
from rllm_viewer.warnings_of_runs import COLUMNS, wrapped


def lines(run: Path, summary: Mapping[str, Any]) -> list[str]:
    """Returns the closing lines of a run that has ended; see hook ``closing_lines``."""
    if not summary.get("optimizer_steps"):
        return []
    found = diagnosis.of_folder(run)
    said = [*_result(run), *_answers(run)]
    if found.nothing_trained:
        said += wrapped(
            f"NOTHING WAS TRAINED: none of the {found.steps} steps had a gradient. The weights are the same."
        )
    for finding in found.findings:
        said += wrapped(f"warning: {finding.text(run)}")
    return [*said, "next:", *(f"  {command}" for command in _next(run, summary, bool(found.findings)))]


def _result(run: Path) -> list[str]:
    result = result_of(run)
    if result.measure is None:
        return []
    form = share if result.measure == "solved" else number
    name = {"reward_mean": "reward", "nll_per_token": "nll per token"}.get(result.measure, result.measure)
    return [f"{name} {form(result.first)} -> {form(result.last)}  {sparkline(result.curve)}".rstrip()]


def _answers(run: Path) -> list[str]:
    """Returns lines with the best and the worst answer of the last recorded step; none if nothing was recorded."""
    try:
        entries = [entry for entry in recordings.index_of(run) if entry.reward_mean is not None]
        last = [entry for entry in entries if entry.step == entries[-1].step]
        rewards = {reward for entry in last for reward in entry.rewards if reward is not None}
        names = ("best", "worst") if len(rewards) > 1 else ("best",)[: len(rewards)]
        return [line for name in names for line in _answer(run, name, last)]
    except (ConfigError, RunError):
        return []


def _answer(run: Path, name: str, entries: list[IndexedGroup]) -> list[str]:
    pick = max if name == "best" else min
    entry = pick(entries, key=lambda each: pick(reward for reward in each.rewards if reward is not None))
    rewarded = [rollout for rollout in group_at(run, entry).rollouts if rollout.reward is not None]
    rollout = pick(rewarded, key=lambda each: each.reward or 0.0)
    head = f"{name:<6}reward {number(rollout.reward)}: "
    return [fitted(head + _asked_and_answered(rollout), COLUMNS)]


def _asked_and_answered(rollout: RecordedRollout) -> str:
    asked, answer = question_and_answer(rollout)
    if answer is None:
        return "no model call"
    return f"{quoted(asked or '')[:200]} -> {quoted(answer)}"


def _next(run: Path, summary: Mapping[str, Any], has_problems: bool) -> list[str]:
    folder = quote(str(run))
    if has_problems or summary.get("status") != "completed":
        first = [f"rllm-core show {folder}", f"rllm-core diagnose {folder}"]
        if summary.get("status") == "completed":
            return [*first, "rllm-core doctor"]
        return [*first, f"rllm-core train --resume --run-dir {folder}"]
    # A workflow that never called the model, such as sft, cannot be evaluated; another one can.
    has_sampled = SAMPLING in summary.get("costs", {}).get("by_kind", {SAMPLING: {}})
    evaluated = "" if has_sampled else "WORKFLOW "
    return [
        f"rllm-core show {folder}",
        f"rllm-core eval {evaluated}--checkpoint {folder}",
        f"rllm-core chat {folder}",
    ]
