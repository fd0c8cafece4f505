"""``rllm-core show``: shows groups of rollouts that a run has recorded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from rllm_core.run_folder.recorded import IndexedGroup

SHOWN_GROUPS = 12


@click.command("show", short_help="Show recorded groups of a run: conversations, rewards, advantages, tokens.")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), help="Only groups of this step.")
@click.option("--group", type=click.IntRange(min=0), help="Only the group with this number.")
@click.option("--task", metavar="ID", help="Only groups of this task.")
@click.option("--reason", help="Only groups with this reason, such as uniform_reward or timeout.")
@click.option("--worst", "pick", flag_value="worst", help="The group with the lowest mean reward.")
@click.option("--best", "pick", flag_value="best", help="The group with the highest mean reward.")
@click.option("--rollout", type=click.IntRange(min=0), help="Only one rollout of the group, with its whole texts.")
@click.option("--tokens", is_flag=True, help="Show tokens with their log-probabilities and advantages.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(
    run: Path,
    step: int | None,
    group: int | None,
    task: str | None,
    reason: str | None,
    pick: str | None,
    rollout: int | None,
    tokens: bool,
    as_json: bool,
) -> None:
    """Show recorded groups of a run: conversations, rewards, advantages and tokens.

    RUN is the folder of a finished or a running run. Without options, lists the latest recorded groups, and summarizes
    the worst group of the last step. The options choose one group, which is shown with all its rollouts.
    """
    from rllm_viewer import recordings
    from rllm_viewer.terminal import console

    entries = recordings.selected(
        recordings.index_of(run), recordings.Wanted(step=step, group=group, task=task, reason=reason)
    )
    is_overview = len(entries) > 1 and pick is None and rollout is None and not tokens
    entry = recordings.most_telling(entries) if pick is None else recordings.extreme(entries, best=pick == "best")
    if as_json:
        click.echo(json.dumps(_json(run, entries, None if is_overview else entry, rollout, tokens)))
    elif is_overview:
        _overview(console(), run, entries, entry)
    else:
        _group(console(), run, entry, rollout, tokens)


def _overview(screen: Console, run: Path, entries: list[IndexedGroup], entry: IndexedGroup) -> None:
    from rich.text import Text

    from rllm_core.run_folder.recorded import group_at
    from rllm_viewer import agent_calls, group_view, recordings, results
    from rllm_viewer.terminal import visible_line

    if (where := results.where_rollouts_ran(run)) is not None:
        screen.print(Text(visible_line(where), overflow="fold"))
    if (agents := _agents(run)) is not None:
        for block in agent_calls.blocks(agents):
            screen.print(block)
        screen.print()
    if len(entries) > SHOWN_GROUPS:
        steps = len({each.step for each in entries})
        screen.print(f"the last {SHOWN_GROUPS} of {len(entries)} recorded groups, of {steps} steps")
    screen.print(group_view.table(entries[-SHOWN_GROUPS:], screen.width))
    screen.print("\nworst of the last step:", style="bold")
    for block in group_view.in_short(group_at(run, entry), lambda: recordings.texts_of_tokens(run)):
        screen.print(block)
    screen.print()
    chosen = f"--group {entry.group}" if entry.group is not None else f"--step {entry.step} --task {quote(entry.task)}"
    screen.print(Text(visible_line(f"the whole group: rllm-core show {quote(str(run))} {chosen}"), overflow="fold"))
    screen.print("other groups: --worst, --best, --step N, --task ID, --reason R; details: --rollout N, --tokens")


def _agents(run: Path) -> dict[str, Any] | None:
    """Returns the agents' counts; None if the metrics are damaged, because the groups can still be shown."""
    from rllm_viewer import agent_calls, results

    try:
        return agent_calls.of_run(run)
    except results.DAMAGED:
        return None


def _group(screen: Console, run: Path, entry: IndexedGroup, rollout: int | None, tokens: bool) -> None:
    from rllm_core.run_folder.recorded import group_at
    from rllm_viewer import group_view, recordings, token_view

    group = group_at(run, entry)
    chosen = group.rollouts if rollout is None else [recordings.rollout_of(group, rollout)]
    if not tokens:
        timings, texts = recordings.timings_of(run), cache(lambda: recordings.texts_of_tokens(run))
        for block in group_view.in_full(group, chosen, timings, texts, whole=rollout is not None):
            screen.print(block)
        return
    spelled, extremes = recordings.texts_of_tokens(run), recordings.best_and_worst(group)
    shown = extremes if rollout is None else chosen
    screen.print(group_view.heading(group))
    for one in shown:
        others = [each for each in extremes if each is not one]
        differs = token_view.first_difference(one, others[-1]) if others else None
        screen.print()
        screen.print(group_view.head(one))
        for block in token_view.tokens(one, spelled, differs, others[-1].episode.rollout_index if others else None):
            screen.print(block)


def _json(
    run: Path, entries: list[IndexedGroup], entry: IndexedGroup | None, rollout: int | None, tokens: bool
) -> dict[str, object]:
    from dataclasses import replace

    from rllm_core.run_folder.recorded import group_at
    from rllm_viewer import recordings

    found: dict[str, object] = {"run": str(run), "groups": [recordings.entry_json(each) for each in entries]}
    found["agents"] = _agents(run)
    if entry is None:
        return found | {"chosen": None}
    group = group_at(run, entry)
    if rollout is not None:
        group = replace(group, rollouts=[recordings.rollout_of(group, rollout)])
    found["chosen"] = recordings.group_json(group, recordings.timings_of(run))
    if tokens:
        texts = recordings.texts_of_tokens(run)
        used = {
            id_
            for r in group.rollouts
            for t in r.episode.trajectories
            for s in t.steps
            for ids in (s.prompt_ids, s.completion_ids)
            for id_ in ids.tolist()
        }
        found["tokens"] = {str(token): texts[token] for token in sorted(used) if token in texts}
    return found
