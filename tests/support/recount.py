"""Counts what a run has spent from its journal and its recorded episodes, and compares that with its books.

It shares no code with the ledger: events and episodes are written by other parts of the loop, from other objects.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rllm_core.run_folder.recorded import group_at, index_of

AMOUNTS = ("calls", "unmetered", "prompt_tokens", "completion_tokens", "seconds")


def check_books(run: Path) -> dict[str, Any] | None:
    """Checks the books of a run that has ended; returns them, or None if it failed before it could spend anything."""
    summary = json.loads((run / "summary.json").read_text())
    if "costs" not in summary:
        assert not (run / "costs.jsonl").exists() or "books_by_reason" not in summary
        return None
    costs: dict[str, Any] = summary["costs"]
    lines = list(_all_lines(run, "costs"))
    _check_totals(costs, lines)
    of_rollout = _by_rollout(lines)
    _check_rollouts(list(_all_lines(run, "events")), of_rollout)
    _check_training(run, summary)
    _check_recorded(run, of_rollout)
    return costs


def _all_lines(run: Path, name: str) -> Iterator[dict[str, Any]]:
    for path in (*sorted(run.glob(f"lost/*/{name}.jsonl")), run / f"{name}.jsonl"):
        for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
            yield json.loads(line)


def _check_totals(costs: dict[str, Any], lines: Sequence[dict[str, Any]]) -> None:
    """Each amount of each kind is the sum over all lines, also those that a resume has put aside."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for line in lines:
        for kind, amounts in line["costs"].items():
            assert amounts.keys() <= set(AMOUNTS), line
            sums[kind].update(amounts)
    assert costs["by_kind"].keys() == sums.keys()
    for kind, said in costs["by_kind"].items():
        for name in AMOUNTS[:-1]:
            assert said.get(name, 0) == sums[kind][name], (kind, name)
        assert abs(said.get("seconds", 0.0) - sums[kind]["seconds"]) <= 1e-6 * (len(lines) + 1), kind
    counted = [amounts for kind, amounts in sums.items() if kind not in ("training", "logprobs")]
    assert costs["calls"] == sum(amounts["calls"] for amounts in counted)
    assert costs["tokens"] == sum(amounts["prompt_tokens"] + amounts["completion_tokens"] for amounts in counted)


def _by_rollout(lines: Sequence[dict[str, Any]]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for line in lines:
        assert len(line.keys() & {"rollout", "scored", "step", "after_step"}) == 1, line
        if "rollout" in line:
            found[line["rollout"]].update(line["costs"].get("sampling", {}))
    return found


def _check_rollouts(events: Sequence[dict[str, Any]], of_rollout: dict[str, Counter[str]]) -> None:
    """Only rollouts that were started have spent anything, and at least what the journal says they returned."""
    started = {event["rollout"] for event in events if event["event"] == "start"}
    ended = [event for event in events if event["event"] == "finish"]
    ended += [one for event in events if event["event"] == "validation" for one in event["episodes"]]
    assert {rollout for rollout in of_rollout if rollout.startswith("train-")} <= started
    for outcome in ended:
        returned = [one for one in outcome["trajectories"] if one["weight_version"] is not None]
        spent = of_rollout.get(outcome["rollout"], Counter())
        assert spent["completion_tokens"] >= sum(one["tokens"] for one in returned) - _written(outcome), outcome
        assert not returned or spent["calls"] > 0, outcome


def _written(outcome: dict[str, Any]) -> int:
    """Returns an upper limit of the target tokens among the tokens of an outcome, which nobody sampled."""
    return sum(one["tokens"] for one in outcome["trajectories"] if one["weight_version"] is None)


def _check_training(run: Path, summary: dict[str, Any]) -> None:
    """The tokens with a gradient are those of the optimizer steps, and those of steps that were not finished."""
    events = list(_all_lines(run, "events"))
    trained = sum(event["sampled_tokens"] for event in events if event["event"] == "step")
    counted = summary["costs"]["by_kind"].get("training", {}).get("completion_tokens", 0)
    whole = not any(event["event"] == "return" for event in events) and not (run / "lost").exists()
    assert counted == trained if whole and summary["status"] == "completed" else counted >= 0


def _check_recorded(run: Path, of_rollout: dict[str, Counter[str]]) -> None:
    """A recorded episode has cost the prompts and completions of its sampled steps, and what it did not return."""
    for entry in index_of(run):
        for rollout in group_at(run, entry).rollouts:
            episode = rollout.episode
            returned_steps = (step for trajectory in episode.trajectories for step in trajectory.steps)
            steps = {step.step_id: step for step in returned_steps if step.weight_version is not None}
            spent = of_rollout.get(episode.rollout_id, Counter())
            assert spent["calls"] - spent["unmetered"] >= len(steps), episode.rollout_id
            for name, ids in (("prompt_tokens", "prompt_ids"), ("completion_tokens", "completion_ids")):
                returned = sum(len(getattr(step, ids)) for step in steps.values())
                assert spent[name] >= returned, (episode.rollout_id, name)
                if spent["calls"] == len(steps):
                    assert spent[name] == returned, (episode.rollout_id, name)
