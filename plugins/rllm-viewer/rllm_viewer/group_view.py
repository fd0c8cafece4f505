"""A recorded group in the terminal: its task, its rollouts, and the reasons for their rewards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rllm_core.run_folder.groups import RecordedGroup, RecordedRollout
from rllm_core.run_folder.recorded import IndexedGroup
from rllm_core.text import counted
from rllm_core.types import TerminationReason, Trajectory
from rllm_viewer import agent_calls, conversation_view
from rllm_viewer.recordings import best_and_worst, parts_of
from rllm_viewer.terminal import (
    columns_of,
    cut,
    fitted,
    labeled,
    number,
    pairs,
    share,
    spread,
    value_text,
    visible,
    visible_line,
)

SHOWN_CHARACTERS = 300
MIN_TASK_COLUMNS = 8
OTHER_COLUMNS = 68
CORRECT = {True: "solved", False: "not solved", None: ""}

Timings = Mapping[str, Mapping[str, Any]]
Texts = Callable[[], Mapping[int, str]]


def table(entries: Sequence[IndexedGroup], columns: int) -> RenderableType:
    """Returns a table with one line per recorded group; long task ids are cut to fit ``columns``."""
    task_columns = max(MIN_TASK_COLUMNS, columns - OTHER_COLUMNS)
    rows = []
    for entry in entries:
        known = [reward for reward in entry.rewards if reward is not None]
        judged = [solved for solved in entry.solved if solved is not None]
        rows.append(
            (
                str(entry.step),
                "-" if entry.group is None else str(entry.group),
                fitted(visible_line(entry.task), task_columns),
                entry.reason if entry.outcome in ("filtered", "failed") else entry.outcome,
                entry.kept,
                f"{sum(judged)}/{len(judged)}" if judged else "-",
                number(min(known, default=None)),
                number(entry.reward_mean),
                number(max(known, default=None)),
            )
        )
    headers = ("STEP", "GROUP", "TASK", "OUTCOME", "KEPT", "SOLVED", "MIN", "MEAN", "MAX")
    return columns_of(headers, rows, right=(0, 1, 5, 6, 7, 8))


def in_short(group: RecordedGroup, texts: Texts) -> Iterator[RenderableType]:
    """Yields the group's last question, and the answers of its best and worst rollout."""
    yield heading(group)
    asked = [m for r in group.rollouts[:1] for t in r.episode.trajectories[:1] for m in conversation_view.opening_of(t)]
    yield from conversation_view.messages(asked[-1:], whole=False)
    for rollout in best_and_worst(group):
        yield Text("")
        yield head(rollout)
        yield from _parts(rollout, whole=False)
        if rollout.episode.error is not None:
            yield labeled("error", cut(rollout.episode.error, SHOWN_CHARACTERS), style="red")
        steps = [step for trajectory in rollout.episode.trajectories for step in trajectory.steps]
        for step in steps[-1:]:
            yield from conversation_view.response(step, texts, whole=False)


def in_full(
    group: RecordedGroup, rollouts: Sequence[RecordedRollout], timings: Timings, texts: Texts, *, whole: bool
) -> Iterator[RenderableType]:
    """Yields the task, the common prompt and each of ``rollouts``.

    Args:
        group: Group to show.
        rollouts: Rollouts of the group to show.
        timings: Seconds of the rollouts' calls, by rollout id.
        texts: Returns the texts of tokens, needed only for a response without content.
        whole: Whether to show long texts in full.
    """
    yield heading(group)
    for name, value in group.task.data.items():
        text = value_text(value)
        yield labeled(name, text if whole else cut(text, SHOWN_CHARACTERS))
    openings = _openings(group)
    for role, opening in openings.values():
        yield Text("")
        yield Text(f"prompt of all rollouts{f', role {visible_line(role)}' if len(openings) > 1 else ''}", style="bold")
        yield from conversation_view.messages(opening, whole=whole)
    for rollout in rollouts:
        yield Text("")
        yield from _rollout(
            rollout, {at: opening for at, (_, opening) in openings.items()}, timings, texts, whole=whole
        )


def heading(group: RecordedGroup) -> Text:
    """Returns a heading that identifies the group and states its outcome."""
    name = "validation" if group.group is None else f"group {group.group}"
    rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
    judged = [r.episode.is_correct for r in group.rollouts if r.episode.is_correct is not None]
    became = group.outcome if group.reason in ("", group.outcome) else f"{group.outcome} ({group.reason})"
    kept = [] if group.kept == group.outcome else [f"kept as {group.kept}"]
    facts = [became, *kept, counted(len(group.rollouts), "rollout")]
    if judged:
        facts.append(f"solved {sum(judged)}/{len(judged)} ({share(sum(judged) / len(judged))})")
    facts.append(f"reward {spread(rewards)}" if rewards else "no rewards")
    if group.weight_version is not None:
        facts.append(f"version {group.weight_version}")
    title = f"step {group.step}, {name}, task {cut_line(group.task.task_id, 40)}: "
    return Text.assemble((title, "bold"), visible_line(", ".join(facts)))


def head(rollout: RecordedRollout) -> Text:
    """Returns a rollout's heading: its reward and related facts."""
    episode = rollout.episode
    reward = rollout.reward
    steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
    facts = [CORRECT[episode.is_correct]]
    if trained := _numbers(rollout.advantages):
        facts.append(f"advantage {spread(trained)}")
    if weights := _numbers(rollout.corrections):
        facts.append(f"correction weight {spread(weights)}")
    if episode.termination_reason is not TerminationReason.DONE:
        facts.append(f"ended with {episode.termination_reason.value}")
    if rollout.outcome not in ("trained", "validation"):
        facts.append(f"{rollout.outcome} ({rollout.reason})")
    versions = sorted({step.weight_version for step in steps if step.weight_version is not None})
    if versions:
        facts.append(f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}")
    facts.append(counted(sum(len(step.completion_ids) for step in steps), "token"))
    if breaks := sum(step.break_reason is not None for step in steps):
        facts.append(counted(breaks, "break"))
    title = f"rollout {episode.rollout_index}: reward {'none' if reward is None else number(reward)}"
    rest = ", ".join(fact for fact in facts if fact)
    return Text.assemble((title, f"bold {_color(trained)}"), visible(f", {rest}"))


def cut_line(text: str, characters: int) -> str:
    """Returns a name as one line of at most ``characters`` characters."""
    line = visible_line(text)
    return line if len(line) <= characters else f"{line[: characters - 3]}..."


def _rollout(
    rollout: RecordedRollout,
    openings: Mapping[int, conversation_view.Messages],
    timings: Timings,
    texts: Texts,
    *,
    whole: bool,
) -> Iterator[RenderableType]:
    episode = rollout.episode
    yield head(rollout)
    yield from _parts(rollout, whole=whole)
    if others := {name: value for name, value in episode.metadata.items() if name != "reward_parts"}:
        text = pairs(others)
        yield labeled("metadata", text if whole else cut(text, SHOWN_CHARACTERS))
    if episode.error is not None:
        yield labeled("error", episode.error if whole else cut(episode.error, SHOWN_CHARACTERS), style="red")
    if spent := _seconds(timings.get(episode.rollout_id, {})):
        yield labeled("time", spent, style="dim")
    several = len(episode.trajectories) > 1
    for at, trajectory in enumerate(episode.trajectories):
        if several:
            yield Text(f"  {_of_trajectory(trajectory, _at(rollout.advantages, at))}", style="bold")
        opening = openings.get(at)
        known = opening if opening is not None and opening == conversation_view.opening_of(trajectory) else None
        yield from conversation_view.calls(trajectory, _at(rollout.advantages, at), known, texts, whole=whole)
        if not trajectory.steps:
            yield labeled("", "no model call", style="dim")


def _parts(rollout: RecordedRollout, *, whole: bool) -> Iterator[RenderableType]:
    """Yields the components of the reward, and the agent's counts if there is an agent."""
    parts = {name: value for name, value in parts_of(rollout).items() if not name.startswith(agent_calls.PREFIX)}
    if parts:
        yield labeled("parts", pairs(parts) if whole else cut(pairs(parts), SHOWN_CHARACTERS))
    if said := agent_calls.of_rollout(rollout.episode):
        yield labeled("agent", said, style="dim")


def _of_trajectory(trajectory: Trajectory, advantages: Sequence[Any]) -> str:
    reward = number(trajectory.total_reward) if trajectory.has_reward else "none"
    trained = _numbers([advantages])
    facts = [f"role {visible_line(trajectory.role)}: reward {reward}"]
    if trained:
        facts.append(f"advantage {spread(trained)}")
    if not trajectory.trainable:
        facts.append("not trainable")
    return ", ".join(facts)


def _color(advantages: Sequence[float]) -> str:
    if not advantages:
        return ""
    mean = sum(advantages) / len(advantages)
    return "green" if mean > 0 else "red" if mean < 0 else ""


def _openings(group: RecordedGroup) -> dict[int, tuple[str, conversation_view.Messages]]:
    """Returns role and first messages by trajectory number, where all rollouts with that trajectory share them."""
    found: dict[int, list[Trajectory]] = defaultdict(list)
    for rollout in group.rollouts:
        for at, trajectory in enumerate(rollout.episode.trajectories):
            if trajectory.steps:
                found[at].append(trajectory)
    shared: dict[int, tuple[str, conversation_view.Messages]] = {}
    for at, trajectories in found.items():
        opening = conversation_view.opening_of(trajectories[0])
        if opening and all(conversation_view.opening_of(other) == opening for other in trajectories):
            shared[at] = (trajectories[0].role, opening)
    return shared


def _numbers(per_trajectory: Sequence[Sequence[Any]]) -> list[float]:
    """Returns the extremes of all steps, from which `spread` shows range and sign."""
    arrays = [step for steps in per_trajectory for step in steps if step is not None and len(step)]
    return [float(extreme) for array in arrays for extreme in (array.min(), array.max())]


def _at(per_trajectory: Sequence[Any], position: int) -> Any:
    return per_trajectory[position] if position < len(per_trajectory) else ()


def _seconds(line: Mapping[str, Any]) -> str:
    """Formats the seconds of a rollout and the total seconds of its calls by kind and name."""
    totals: dict[str, list[float]] = defaultdict(list)
    for call in line.get("calls") or ():
        if isinstance(call, dict) and isinstance(call.get("seconds"), int | float):
            kind, name = str(call.get("kind", "call")), call.get("name")
            totals[f"{kind} {name}" if name else kind].append(float(call["seconds"]))
    spent = [f"{name} {sum(seconds):.2f} s in {counted(len(seconds), 'call')}" for name, seconds in totals.items()]
    whole = line.get("seconds")
    return ", ".join([f"{whole:.2f} s in all", *spent] if isinstance(whole, int | float) else spent)
