"""Metrics of a step or validation, computed from its events as docs/run-folder.md describes them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rllm_viewer.verify.records import GroupRecord, Outcome, Part

ROUNDING = 1e-9  # rewards of a group that differ by less are equal
UNTOLD = "untold"
SHARES = ("groups_solved_by_none", "groups_solved_by_some", "groups_solved_by_all")


def mean(values: Sequence[float]) -> float | None:
    """Returns the mean, or None without values, because unknown metrics are absent."""
    return math.fsum(values) / len(values) if values else None


def solved_by(outcomes: Iterable[Outcome]) -> str | None:
    """Returns the share that a group counts toward; None if no rollout has ``is_correct``."""
    outcomes = list(outcomes)
    if any(outcome.parts is None for outcome in outcomes):
        return UNTOLD  # an earlier version wrote neither field
    judged = [outcome.is_correct for outcome in outcomes if outcome.is_correct is not None]
    return SHARES[any(judged) + all(judged)] if judged else None


def oldest_version(group: GroupRecord) -> int | None:
    """Returns the version of a complete group; None if no event records which trajectories survived filtering."""
    if group.members is None:
        return None
    named = [[part.weight_version for part in parts] for parts in _members(group).values()]
    if group.filtered is not None:
        named = [
            [version] for version in (outcome.weight_version for outcome in group.ended_well) if version is not None
        ]
    known = [[version for version in versions if version is not None] for versions in named]
    return min(
        (min(versions, default=group.dispatched_version) for versions in known), default=group.dispatched_version
    )


def of_step(
    groups: Sequence[GroupRecord], live: int, filtered: Counter[str | None], told: dict[str, Any]
) -> dict[str, Any]:
    """Computes the metrics of an optimizer step that follow from its events.

    Args:
        groups: Groups that the step consumed, including filtered ones.
        live: Weight version before the step.
        filtered: Number of groups filtered since the previous step, by share.
        told: The step event.
    """
    ages = [live - group.weight_version for group in groups]
    expected: dict[str, Any] = {
        "step": told["step"],
        "groups": sum(group.filtered is None for group in groups),
        "staleness_mean": mean(ages),
        "staleness_max": max(ages, default=None),
    }
    expected |= {name: told[name] for name in ("trajectories", "samples", "sampled_tokens") if name in told}
    if all(group.epoch is not None for group in groups):
        expected["epoch"] = max((group.epoch for group in groups if group.epoch is not None), default=None)
    if any(group.members is None or outcome.parts is None for group in groups for outcome in group.outcomes.values()):
        return expected
    expected |= _solved(groups, filtered)
    return expected | _of_trajectories(groups)


def _solved(groups: Sequence[GroupRecord], filtered: Counter[str | None]) -> dict[str, Any]:
    outcomes = [outcome for group in groups for outcome in group.ended_well]
    expected: dict[str, Any] = {
        "solved": mean([outcome.is_correct for outcome in outcomes if outcome.is_correct is not None])
    }
    if UNTOLD not in filtered:
        counts = filtered + Counter(solved_by(group.ended_well) for group in groups)
        total = sum(counts[name] for name in SHARES)
        expected |= {name: counts[name] / total if total else None for name in SHARES}
    return expected


def _of_trajectories(groups: Sequence[GroupRecord]) -> dict[str, Any]:
    named = [parts for group in groups for parts in _members(group).values()]
    trained = [part for parts in named for part in parts]
    # Filtered groups among the consumed ones count, too, because they also measure the policy.
    gone_without = [outcome for group in groups if group.filtered is not None for outcome in group.ended_well]
    parts = [*trained, *(part for outcome in gone_without for part in outcome.parts or () if part.turns)]
    rewards: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        if part.reward is not None:
            rewards[part.role].append(part.reward)
    flat = [reward for of_role in rewards.values() for reward in of_role]
    whole = [[part.reward for part in parts if part.reward is not None] for parts in named]
    uniform = [_is_uniform(known) for known, parts in zip(whole, named, strict=True) if len(known) == len(parts)]
    return {
        "trajectories": len(trained),
        "reward_mean": mean(flat),
        "trajectory_reward_min": min(flat, default=None),
        "trajectory_reward_max": max(flat, default=None),
        "uniform_groups_share": mean(uniform),
        "turns_mean": mean([part.turns for part in parts]),
        "response_tokens_mean": mean([part.tokens for part in parts]),
        **({f"reward_mean/{role}": mean(of_role) for role, of_role in rewards.items()} if len(rewards) > 1 else {}),
    }


def of_validation(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Computes the fields of a validation that follow from its episodes."""
    rewards = [mean([part.reward for part in one.parts or () if part.reward is not None]) for one in outcomes]
    return {
        "reward_mean": mean([reward for reward in rewards if reward is not None]),
        "solved": mean([outcome.is_correct for outcome in outcomes if outcome.is_correct is not None]),
    }


def counted_places(groups: Sequence[GroupRecord]) -> dict[str, dict[int, bool]] | None:
    """Finds the trajectories that count for a step's metrics, and whether each was trained.

    Returns:
        Whether each trajectory was trained, by rollout id and trajectory position; None if no event records this.
    """
    places: dict[str, dict[int, bool]] = defaultdict(dict)
    for group in groups:
        if group.members is None:
            return None
        for index, place in (pair for pairs in group.members.values() for pair in pairs):
            places[group.outcomes[index].rollout][place] = True
        if group.filtered is not None:
            for outcome in group.ended_well:
                places[outcome.rollout] = {place: False for place, part in enumerate(outcome.parts or ()) if part.turns}
    return places


def _members(group: GroupRecord) -> dict[str, list[Part]]:
    named: dict[str, list[Part]] = {}
    for name, places in (group.members or {}).items():
        named[name] = [(group.outcomes[index].parts or [])[place] for index, place in places]
    return named


def _is_uniform(rewards: Sequence[float]) -> bool:
    return not rewards or max(rewards) - min(rewards) <= ROUNDING * max(map(abs, rewards))
