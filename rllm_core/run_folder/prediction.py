"""Predicts the costs of a run from the costs of another run, or from assumptions that it names."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm_core.config import RunConfig
from rllm_core.costs import SAMPLING, Spent, Tally, amounts_of
from rllm_core.errors import ConfigError
from rllm_core.run_folder.journal import read_json_lines
from rllm_core.run_folder.recorded import COSTS
from rllm_core.text import counted

LAST_SHARE = 3  # steps beyond those of the other run are assumed to cost as much as its last third


@dataclass(frozen=True)
class Prediction:
    """Expected costs of a run.

    Attributes:
        how: How the amounts were predicted, in one sentence.
    """

    kinds: dict[str, Spent]
    how: str

    def to_dict(self, config: RunConfig) -> dict[str, Any]:
        """Returns the prediction for ``--dry-run --json``, in the same form as the costs in ``summary.json``."""
        by_kind = {kind: spent.to_dict() for kind, spent in sorted(self.kinds.items())}
        return {**amounts_of(self.kinds, config.costs), "by_kind": by_kind, "how": self.how}


def predict(config: RunConfig, validation_rollouts: int, like: Path | None, *, samples: bool = True) -> Prediction:
    """Predicts the costs of a run.

    Without a run to predict from, assumes one call per rollout, or none if nothing is sampled.

    Raises:
        ConfigError: If the folder holds no run with steps and costs.
    """
    training = config.training
    rollouts = training.groups_per_step * training.rollouts_per_group
    every = training.validate_every_steps
    validated = {0, training.steps, *(range(0, training.steps, every) if every else ())} if validation_rollouts else ()
    measured = len(validated) * validation_rollouts
    if like is not None:
        return _like(like, training.steps, rollouts, measured)
    if not samples:
        return Prediction(
            {}, "the workflow never calls the model, and training is left out; add --like RUN to include it"
        )
    calls = training.steps * rollouts + measured
    most = config.rollout.max_response_tokens
    return Prediction(
        {SAMPLING: Spent(calls=calls, completion_tokens=calls * most)},
        f"assumed, not measured: one call for each of {calls:,} rollouts with all {most} tokens of "
        "rollout.max_response_tokens, no filtered groups, and prompts left out; make a short run, and add --like RUN",
    )


def _like(run: Path, steps: int, rollouts: int, measured: int) -> Prediction:
    lines = read_json_lines(run / f"{COSTS}.jsonl")
    try:
        before = tomllib.loads((run / "run.toml").read_text(encoding="utf-8"))["training"]
    except (OSError, ValueError, LookupError) as error:
        said = "it has no run.toml" if isinstance(error, FileNotFoundError) else f"{error} (run.toml)"
        raise ConfigError(
            f"--like {run} is not a run folder: {said}; name the folder of a run that has trained"
        ) from error
    known, rest = _by_step(lines)
    if not known:
        raise ConfigError(f"{run} has no {COSTS}.jsonl with optimizer steps; name a run that has trained steps")
    scale = rollouts / (before["groups_per_step"] * before["rollouts_per_group"])
    last = known[-max(len(known) // LAST_SHARE, 1) :]
    more = max(steps - len(known), 0)
    total = Tally()
    _add(total, [line for step in known[:steps] for line in step], scale)
    _add(total, [line for step in last for line in step], scale * more / len(last))  # at once: sums are rounded
    _add(total, rest, scale)
    validation = [line for line in lines if _is_of(line, "validation-")]
    played = sum("rollout" in line for line in validation)
    how = f"as {run} spent it in {counted(min(steps, len(known)), 'step')}"
    if more:
        how += f", and then {counted(more, 'step')} like its last {len(last)}"
    if played:
        _add(total, validation, measured / played)
        how += f"; {counted(measured, 'validation rollout')} like its {played:,}"
    if scale != 1:
        how += f"; scaled by {scale:.3g} for the rollouts of a step"
    return Prediction(total.kinds, how)


def _by_step(lines: Sequence[dict[str, Any]]) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any]]]:
    """Returns the lines of training, grouped by the step they were written in, and those after the last step."""
    steps: list[list[dict[str, Any]]] = [[]]
    for line in lines:
        if not _is_of(line, "validation-"):
            steps[-1].append(line)
        if "step" in line:
            steps.append([])
    return steps[:-1], steps[-1]


def _is_of(line: dict[str, Any], purpose: str) -> bool:
    return str(line.get("rollout", line.get("scored", ""))).startswith(purpose)


def _add(total: Tally, lines: Iterable[dict[str, Any]], factor: float) -> None:
    whole = Tally()
    for line in lines:
        whole.add_all(line["costs"])
    for kind, spent in whole.kinds.items():
        total.add(
            kind,
            round(spent.calls * factor),
            round(spent.prompt_tokens * factor),
            round(spent.completion_tokens * factor),
            spent.seconds * factor,
            unmetered=round(spent.unmetered * factor),
        )
