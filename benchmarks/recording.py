"""Cost of recording whole groups: bytes per sampled token, and CPU time as a share of the optimizer step.

One real run trains the starter model in steps of 16 groups of 16 rollouts. Every call of
`rllm_core.training.recording.Recording` is measured around it with the CPU time of its thread, and the steps with that
of the process. The bytes are compared with what the same episodes take as JSON, as ``trajectories.jsonl`` holds them.
Other files that belong to the groups (index, timings, texts of tokens) count as part of the recording.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.trials import Figures, RawTrials, Row, of_kind, run
from rllm_core.assembly.parts import parts_of
from rllm_core.assembly.resolution import resolve_run
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.run_folder.recorded import group_at, index_of
from rllm_core.runs import launch
from rllm_core.training.recording import Recording
from rllm_core.training.trainer import Trainer

GROUPS, ROLLOUTS = 16, 16
FILES = ("groups", "groups_index", "group_timings", "tokens")


def measure(options: argparse.Namespace, trials: RawTrials) -> None:
    """Trains once per workflow."""
    torch.set_num_threads(1)
    for workflow in ("sort", "calculator"):
        with TemporaryDirectory() as folder:
            _train(trials, workflow, options.steps, Path(folder) / "run")
            _sizes(trials, workflow, Path(folder) / "run")


def _train(trials: RawTrials, workflow: str, steps: int, folder: Path) -> None:
    overrides = (
        f"training.steps={steps}",
        f"training.groups_per_step={GROUPS}",
        f"training.rollouts_per_group={ROLLOUTS}",
        f"training.validation_rollouts={GROUPS}",
    )
    spent: list[float] = []
    with _measured(Recording, ("trained", "filtered", "validated"), spent):
        _steps(trials, workflow, overrides, folder, spent)


class _measured:
    """Adds the CPU seconds of some methods to a list, until the end of the context."""

    def __init__(self, owner: type, names: Sequence[str], spent: list[float]) -> None:
        self._owner, self._names, self._spent = owner, names, spent
        self._originals: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> None:
        for name in self._names:
            self._originals[name] = original = getattr(self._owner, name)
            setattr(self._owner, name, self._timed(original))

    def __exit__(self, *error: object) -> None:
        for name, original in self._originals.items():
            setattr(self._owner, name, original)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            before = time.thread_time()
            try:
                return original(*arguments, **named)
            finally:
                self._spent.append(time.thread_time() - before)

        return timed


def _steps(trials: RawTrials, workflow: str, overrides: tuple[str, ...], folder: Path, spent: list[float]) -> None:
    original = Trainer._train_step

    async def train_step(self: Trainer, step: int) -> None:
        before, already = time.process_time(), sum(spent)
        await original(self, step)
        trials.add(
            {
                "kind": "step",
                "workflow": workflow,
                "step": step,
                "cpu_seconds": time.process_time() - before,
                "recording_cpu_seconds": sum(spent) - already,
            }
        )

    plugins = PluginManager.from_environment()
    Trainer._train_step = train_step  # type: ignore[method-assign]
    try:
        parts = parts_of(resolve_run(workflow, plugins, overrides=overrides))
        asyncio.run(launch.train(parts, folder, resume=False, progress=Progress()))
    finally:
        Trainer._train_step = original  # type: ignore[method-assign]


def _sizes(trials: RawTrials, workflow: str, folder: Path) -> None:
    """Adds a row per recorded group."""
    for entry in index_of(folder):
        group = group_at(folder, entry)
        episodes = [rollout.episode for rollout in group.rollouts]
        steps = [step for e in episodes for t in e.trajectories for step in t.steps]
        trials.add(
            {
                "kind": "group",
                "workflow": workflow,
                "outcome": entry.outcome,
                "rollouts": len(episodes),
                "sampled_tokens": sum(len(step.completion_ids) for step in steps),
                "bytes": entry.length + 1,
                "bytes_as_trajectories": sum(
                    len(f'{{"step":{group.step},"episode":{episode.to_json()}}}'.encode()) + 1 for episode in episodes
                ),
            }
        )
    sizes = {name: (folder / f"{name}.jsonl").stat().st_size for name in FILES}
    trials.add({"kind": "files", "workflow": workflow, **sizes})


def figures(rows: Sequence[Row]) -> Figures:
    """Computes the figures."""
    result: Figures = {}
    for workflow in ("sort", "calculator"):
        groups = [row for row in of_kind(rows, "group", workflow=workflow) if row["outcome"] == "trained"]
        every = of_kind(rows, "group", workflow=workflow)
        [files] = of_kind(rows, "files", workflow=workflow)
        steps = of_kind(rows, "step", workflow=workflow)
        tokens = sum(row["sampled_tokens"] for row in every)
        before = sum(row["bytes_as_trajectories"] for row in every)
        recorded = sum(files[name] for name in FILES)
        result |= {
            f"{workflow}_whole_groups_share": sum(row["rollouts"] == ROLLOUTS for row in groups) / len(groups),
            f"{workflow}_bytes_per_token": round(sum(row["bytes"] for row in every) / tokens, 2),
            f"{workflow}_bytes_per_token_all_files": round(recorded / tokens, 2),
            f"{workflow}_bytes_per_token_before": round(before / tokens, 2),
            f"{workflow}_bytes_ratio": round(sum(row["bytes"] for row in every) / before, 3),
            f"{workflow}_bytes_ratio_all_files": round(recorded / before, 3),
            f"{workflow}_recording_cpu_share": round(
                sum(row["recording_cpu_seconds"] for row in steps) / sum(row["cpu_seconds"] for row in steps), 5
            ),
        }
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recording", description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps per workflow (default 12)")
    run("recording", parser, measure, figures, arguments)


if __name__ == "__main__":
    main()
