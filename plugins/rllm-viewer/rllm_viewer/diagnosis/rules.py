"""The signs of each problem in one optimizer step's metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rllm_viewer.diagnosis import agents
from rllm_viewer.diagnosis.answers import AnswerCounts
from rllm_viewer.diagnosis.causes import Cause

Row = Mapping[str, Any]

FIRST_STEPS = 3
MOSTLY = 0.75
HUGE_GRADIENT = 10.0  # times the limit; up to this factor, clipping every step is common in healthy runs
FAR_APART = 0.05  # mean abs(log ratio); low precision alone stays below it
FEW_EFFECTIVE = 0.3
RISEN_SHARE = 0.1
FAILED_SHARE = 0.2
MIN_FAILED = 8
ANSWERS_OF_OTHER_ROWS = "workflow/answers_of_other_rows"  # metric of workflow dataset
SOME = 0.005


@dataclass(frozen=True)
class Rule:
    """A problem that shows in the metrics of several steps in a row.

    Attributes:
        name: Section of the page ``docs/what-went-wrong.md``.
        steps: Number of consecutive steps with the problem until it is certain, and without it until it is over.
        holds: Whether a step shows it, given the run file and the run's first steps.
        seen: The observation.
        causes: Usual causes, the most likely first.
        decides: Command that distinguishes the causes, with ``RUN`` for the folder.
        explain: Finds the cause from the run's answers and mean metrics; None keeps the usual ones.
    """

    name: str
    steps: int
    holds: Callable[[Row, Mapping[str, Any], list[Row]], bool]
    seen: str
    causes: tuple[str, ...]
    decides: str = "rllm-core show RUN"
    explain: Callable[[AnswerCounts, Row], Cause | None] | None = None


def explains(metric: str) -> bool:
    """Whether a metric distinguishes causes, so that the rules get its mean."""
    return metric == ANSWERS_OF_OTHER_ROWS or metric.startswith(agents.BREAKS)


def _why_cut_off(answers: AnswerCounts, means: Row) -> Cause | None:
    if (end := answers.end_that_is_no_stop) is not None:
        seen = f"the answers continue after {end}"
        return Cause(
            (f"the stop token is missing: {end} ends an answer, but is not an eos_token_id of the model",), "", seen
        )
    if answers.is_of_another_template:
        return _wrong_template(answers)
    if answers.never_stops:
        seen = f"{answers.past_end} of {answers.cut_off} recorded ones continue after the answer, or repeat themselves"
        return Cause(("the stop token is missing: the model never samples it after an answer",), "", seen)
    return None


def _why_never_solved(answers: AnswerCounts, means: Row) -> Cause | None:
    if answers.is_of_another_template:
        return _wrong_template(answers)
    others = means.get(ANSWERS_OF_OTHER_ROWS)
    if others is None:
        return None
    if others > SOME:
        seen = f"{others:.1%} of the answers are the expected ones of other rows"
        return Cause(("the expected answers belong to other rows", "the model only guesses"), seen=seen)
    return Cause(
        ("the tasks are too hard for the model", "its chat template differs from the one it was trained with"),
        "rllm-core show RUN --tokens",
    )


def _wrong_template(answers: AnswerCounts) -> Cause:
    seen = []
    if answers.empty:
        seen.append(f"{answers.empty} are empty")
    if answers.with_markers:
        [(marker, _)] = answers.markers.most_common(1)
        seen.append(f"{answers.with_markers} have control tokens such as {marker}")
    return Cause(
        ("the chat template is wrong for this model", "the model has never learned to write such answers"),
        "rllm-core show RUN --tokens",
        f"of {answers.all} recorded answers, {' and '.join(seen)}",
    )


def _is_cut_off(row: Row, tables: Mapping[str, Any], first: list[Row]) -> bool:
    return bool(row.get("truncated_share", 0.0) >= MOSTLY)


def _is_uniform(row: Row) -> bool:
    return bool(row.get("uniform_groups_share", 0.0) == 1.0)


def _was_better(row: Row, first: list[Row]) -> bool:
    """Whether one of the first steps had higher rewards that also differed."""
    return any(not _is_uniform(one) and row.get("reward_mean", 0.0) < one.get("reward_mean", 0.0) for one in first)


def _has_risen(row: Row, first: list[Row]) -> bool:
    """Whether the reward has risen above the first steps by a share of the range of rewards."""
    if "reward_mean" not in row or not first:
        return False
    before = sum(one.get("reward_mean", 0.0) for one in first) / len(first)
    spread = row.get("trajectory_reward_max", 0.0) - row.get("trajectory_reward_min", 0.0)
    return bool(row["reward_mean"] - before > RISEN_SHARE * spread)


def _is_broken(row: Row, tables: Mapping[str, Any], first: list[Row]) -> bool:
    return _is_uniform(row) and not row.get("solved") and _was_better(row, first)


def _is_equal(row: Row, tables: Mapping[str, Any], first: list[Row]) -> bool:
    return _is_uniform(row) and "solved" not in row and not _was_better(row, first)


def _is_never_solved(row: Row, tables: Mapping[str, Any], first: list[Row]) -> bool:
    is_explained = _was_better(row, first) or _is_cut_off(row, tables, first)
    return _is_uniform(row) and row.get("solved") == 0.0 and not is_explained


def _is_always_solved(row: Row, tables: Mapping[str, Any], first: list[Row]) -> bool:
    return row.get("solved") == 1.0 and all(one.get("solved", 0.0) >= MOSTLY for one in first)


def _is_partly_solved(row: Row, tables: Mapping[str, Any], first: list[Row]) -> bool:
    return row.get("groups_solved_by_none") == 1.0 and not _is_uniform(row) and not _has_risen(row, first)


def _is_equal_but_judged(row: Row, tables: Mapping[str, Any], first: list[Row]) -> bool:
    solved = row.get("solved")
    return _is_uniform(row) and solved is not None and 0.0 < solved < MOSTLY and not _is_one_answer(row, tables, first)


def _is_one_answer(row: Row, tables: Mapping[str, Any], first: list[Row]) -> bool:
    """Whether a group's rollouts are all the same wrong sequence; the best policies are certain, too, but correct."""
    distinct = row.get("distinct_samples_share", 1.0) * row.get("samples", 0.0)
    is_sampled = row.get("trajectories", 0.0) > row.get("groups", 0.0) and "reward_mean" in row
    return bool(is_sampled and 0 < distinct <= row["groups"] + 0.5 and row.get("solved", 0.0) < MOSTLY)


def _is_clipped(row: Row, tables: Mapping[str, Any], first: list[Row]) -> bool:
    limit = tables.get("optimizer", {}).get("max_grad_norm") or 0.0
    return bool(0.0 < limit * HUGE_GRADIENT < (row.get("grad_norm") or 0.0))


def _is_stale(row: Row, tables: Mapping[str, Any], first: list[Row]) -> bool:
    share, masked = row.get("off_policy_effective_share"), row.get("masked_share") or 0.0
    return row.get("staleness_mean", 0.0) > 0 and ((share is not None and share < FEW_EFFECTIVE) or masked > MOSTLY)


def _is_apart(row: Row, tables: Mapping[str, Any], first: list[Row]) -> bool:
    fresh = row.get("off_policy_log_ratio/age_0")
    if fresh is None and row.get("staleness_max") == 0.0:
        fresh = row.get("off_policy_log_ratio")
    return fresh is not None and fresh > FAR_APART


RULES = (
    Rule(
        "the-policy-broke",
        FIRST_STEPS,
        _is_broken,
        "the rewards have fallen, and all rollouts of a group now get the same reward",
        (
            "the learning rate is too high (optimizer.learning_rate)",
            "the policy has exploited the reward and ended in a dead end",
        ),
        "rllm-core compare RUN OTHER, with a run at a tenth of optimizer.learning_rate",
    ),
    Rule(
        "answers-cut-off",
        FIRST_STEPS,
        _is_cut_off,
        "most answers are truncated at rollout.max_response_tokens",
        (
            "rollout.max_response_tokens is too small",
            "the model never samples its stop token, as with a wrong template",
        ),
        "rllm-core show RUN --tokens",
        _why_cut_off,
    ),
    Rule(
        "nobody-solves-it",
        FIRST_STEPS,
        _is_never_solved,
        "no rollout solves its task, rewards are equal within every group, and nothing is learned",
        ("the tasks are too hard for the model", "the reward function never rewards a solution"),
        explain=_why_never_solved,
    ),
    Rule(
        "all-groups-equal",
        FIRST_STEPS,
        _is_equal,
        "all rollouts of a group get the same reward, so nothing is learned",
        ("the reward is always the same", "the tasks are too hard or too easy for the model"),
    ),
    Rule(
        "everybody-solves-it",
        FIRST_STEPS,
        _is_always_solved,
        "all rollouts have solved their tasks from the start, so nothing is learned",
        ("the tasks are too easy for the model", "the reward function accepts any answer"),
    ),
    Rule(
        "one-answer",
        5,
        _is_one_answer,
        "all rollouts of a group give the same wrong answer",
        ("the policy has collapsed: the learning rate is too high", "rollout.temperature is too low"),
    ),
    Rule(
        "all-groups-equal",
        10,
        _is_equal_but_judged,
        "all rollouts of a group get the same reward, so nothing is learned",
        ("the tasks are too hard or too easy for the model", "the reward does not depend on the answer"),
    ),
    Rule(
        "gradient-always-clipped",
        10,
        _is_clipped,
        "the gradient is more than ten times optimizer.max_grad_norm in every step",
        ("the learning rate is too high, and training diverges", "optimizer.max_grad_norm is too small"),
        "rllm-core compare RUN OTHER, with a run at a tenth of optimizer.learning_rate",
    ),
    Rule(
        "too-stale",
        5,
        _is_stale,
        "rollouts are so stale when they are trained that most of their tokens have almost no weight",
        ("training.staleness_threshold is too high", "the learning rate is too high for this staleness"),
        "rllm-core compare RUN OTHER, with a run at training.staleness_threshold = 0",
    ),
    Rule(
        "sampler-and-trainer-apart",
        FIRST_STEPS,
        _is_apart,
        "engine and trainer compute different probabilities for fresh tokens",
        ("their precision or sampling settings differ", "the engine has different weights"),
        "rllm-core doctor",
    ),
    Rule(
        "every-call-a-conversation",
        FIRST_STEPS,
        agents.calls_start_over,
        "most calls of the agent start a new conversation, so their prompts are computed again",
        ("the agent rewrites its history", "it asks single questions, which is fine"),
        explain=agents.why_calls_start_over,
    ),
    Rule(
        "conversations-break",
        FIRST_STEPS,
        agents.segments_break,
        "many calls of the agent start a new segment of their conversation, so their prompts are computed again",
        ("the agent changes its messages or tools between calls",),
        explain=agents.why_segments_break,
    ),
    Rule(
        "nobody-solves-it",
        30,
        _is_partly_solved,
        "no rollout solves its task, although rewards differ",
        ("the tasks are too hard for the model", "the reward function rewards something other than a solution"),
    ),
)
