"""The groups that a run has recorded, and the choice of the one that a user asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rllm_core.errors import ConfigError, RunError
from rllm_core.run_folder import recorded
from rllm_core.run_folder.groups import MEASURES, RecordedGroup, RecordedRollout
from rllm_core.run_folder.recorded import IndexedGroup
from rllm_viewer.results import tables_of
from rllm_viewer.terminal import visible_line

SHOWN_VALUES = 8


@dataclass(frozen=True)
class Wanted:
    """Groups that a user asks for; None leaves a field open."""

    step: int | None = None
    group: int | None = None
    task: str | None = None
    reason: str | None = None

    def matches(self, entry: IndexedGroup) -> bool:
        """Whether a recorded group is among the groups asked for."""
        return all(value is None or value == getattr(entry, name) for name, value in asdict(self).items())


def index_of(run: Path) -> list[IndexedGroup]:
    """Returns the entries of all recorded groups of a run, oldest first.

    Raises:
        ConfigError: If the folder is not a run folder, or has no recorded group.
        RunError: If the index is damaged.
    """
    kept = tables_of(run).get("training", {}).get("groups_kept_per_step")
    entries = recorded.index_of(run)
    if not entries and kept is None:
        raise ConfigError(
            f"{run} has no recorded groups: the version of rllm-core that wrote it did not record them. A new run "
            "does; trajectories.jsonl has single episodes of this one"
        )
    if not entries and kept == 0:
        raise ConfigError(f"{run} has no recorded groups: its run file has training.groups_kept_per_step = 0")
    if not entries:
        raise ConfigError(f"{run} has not recorded a group yet; the first validation and each step record some")
    return entries


def selected(entries: Sequence[IndexedGroup], wanted: Wanted) -> list[IndexedGroup]:
    """Returns the entries that a user asks for.

    Raises:
        ConfigError: If there are none; the message lists the recorded values.
    """
    found = [entry for entry in entries if wanted.matches(entry)]
    if found:
        return found
    given = {name: value for name, value in asdict(wanted).items() if value is not None}
    asked = " and ".join(f"{name} {value}" for name, value in given.items())
    known = []
    for name in given:
        counted = Counter(getattr(entry, name) for entry in entries if getattr(entry, name) is not None)
        # Of numbers, list the latest, which a user most likely wants; of names, the most frequent.
        values = [value for value, _ in counted.most_common()] if name == "reason" else list(counted)
        shown = values[:SHOWN_VALUES] if name == "reason" else values[-SHOWN_VALUES:]
        more = f" ({len(values) - len(shown)} more)" if len(values) > len(shown) else ""
        known.append(f"{name} {', '.join(map(str, shown))}{more}")
    raise ConfigError(visible_line(f"no recorded group has {asked}; recorded: {'; '.join(known)}"))


def extreme(entries: Sequence[IndexedGroup], *, best: bool) -> IndexedGroup:
    """Returns the group with the highest or lowest mean reward (the latest of equals); the last one without rewards.

    A validation group is chosen only if there are no others: it may have one rollout, and nothing was trained on it.
    """
    entries = [entry for entry in entries if entry.outcome != "validation"] or entries
    rewarded = [(entry.reward_mean, at) for at, entry in enumerate(entries) if entry.reward_mean is not None]
    if not rewarded:
        return entries[-1]
    wanted = (max if best else min)(reward for reward, _ in rewarded)
    return entries[max(at for reward, at in rewarded if reward == wanted)]


def most_telling(entries: Sequence[IndexedGroup]) -> IndexedGroup:
    """Returns the worst group of the last step."""
    last = max(entry.step for entry in entries)
    return extreme([entry for entry in entries if entry.step == last], best=False)


def timings_of(run: Path) -> dict[str, dict[str, Any]]:
    """Returns each rollout's line of ``group_timings.jsonl`` by rollout id; empty if the file is damaged.

    Groups can be shown without their timings.
    """
    try:
        return recorded.timings_of(run)
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def texts_of_tokens(run: Path) -> dict[int, str]:
    """Returns the text of every token id in the recorded groups.

    Raises:
        RunError: If the file is damaged.
    """
    try:
        return recorded.texts_of_tokens(run)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(f"{run / f'{recorded.TOKENS}.jsonl'} cannot be read: {error}") from error


def parts_of(rollout: RecordedRollout) -> dict[str, Any]:
    """Returns the reward components of a rollout, and the workflow's other metrics, by name."""
    parts = rollout.episode.metadata.get("reward_parts")
    return {**rollout.episode.metrics, **(parts if isinstance(parts, dict) else {})}


def best_and_worst(group: RecordedGroup) -> list[RecordedRollout]:
    """Returns the rollouts with the highest and the lowest reward; fewer if they coincide or have no reward."""
    rewarded = [rollout for rollout in group.rollouts if rollout.reward is not None]
    if not rewarded:
        return list(group.rollouts[:1])
    best = max(rewarded, key=lambda rollout: rollout.reward or 0.0)
    worst = min(rewarded, key=lambda rollout: rollout.reward or 0.0)
    return [best] if best is worst else [best, worst]


def rollout_of(group: RecordedGroup, index: int) -> RecordedRollout:
    """Returns the rollout with this index.

    Raises:
        ConfigError: If the group has no such rollout.
    """
    for rollout in group.rollouts:
        if rollout.episode.rollout_index == index:
            return rollout
    known = ", ".join(str(rollout.episode.rollout_index) for rollout in group.rollouts)
    raise ConfigError(f"the group has no rollout {index}; it has {known}")


def entry_json(entry: IndexedGroup) -> dict[str, Any]:
    """Returns an index entry of a group as JSON data."""
    fields = entry.to_json()
    return {name: fields[name] for name in fields if name not in ("offset", "length")} | {
        "reward_mean": entry.reward_mean
    }


def group_json(group: RecordedGroup, timings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns a whole group with its episodes and per-token numbers as JSON data."""
    fields = {name: getattr(group, name) for name in ("step", "group", "kept", "outcome", "reason", "weight_version")}
    rollouts = [
        {
            "outcome": rollout.outcome,
            "reason": rollout.reason,
            "reward": rollout.reward,
            "reward_parts": parts_of(rollout),
            **{name: _lists(getattr(rollout, name)) for name in MEASURES},
            "calls": timings.get(rollout.episode.rollout_id, {}).get("calls"),
            "episode": rollout.episode.model_dump(mode="json"),
        }
        for rollout in group.rollouts
    ]
    return fields | {"task": group.task.model_dump(mode="json"), "rollouts": rollouts}


def _lists(numbers: Sequence[Sequence[Any]]) -> list[list[list[float] | None]]:
    return [[None if of_step is None else of_step.tolist() for of_step in of_steps] for of_steps in numbers]
