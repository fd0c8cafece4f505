"""Group scorers in whole runs: each two of mode, model that is asked and unscored rollouts, and those per estimator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import rllm_local
import rllm_renderers

import rllm_devkit.scripted_plugin
from rllm_core import providers
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_viewer.verify import verify

OWN = PluginManager.from_environment(no_plugins=True)
LATE = ("training.staleness_threshold=1", "training.partial_rollout=true")
MODES: dict[str, tuple[str, tuple[str, ...]]] = {
    "scripted, synchronous": ("scripted", ()),
    "scripted, asynchronous": ("scripted", (*LATE, "training.groups_per_forward_backward=1")),
    "scripted, devices shared": ("scripted_colocated", ("training.trigger_parameter_sync_step=2",)),
    "local, colocated": ("local", ()),
    "local, separated": ("local", ("local.generation=separated", *LATE)),
}
ESTIMATORS = [
    name
    for name, provided in sorted(OWN.providers(providers.AdvantageEstimatorProvider).items())
    if not (found := OWN.load(provided)).learns_written and not found.needs_teacher
]
ASKED = ("nobody", "policy", "version 0", "another model")
UNSCORED = ("none", "one", "a group")
WORKFLOW = """
import numpy as np

from rllm_core.types import Task
from rllm_core.workflow import Workflow


class Unlabeled(Workflow):
    def tasks(self, split):
        return [Task(task_id=f"{split}-{letter}", data={}) for letter in "abcdefgh"]

    async def run(self, task, completer):
        step = await completer.complete([{"role": "user", "content": task.task_id}])
        given = (step.completion_ids % 5 - 2).astype(np.float32)  # for estimators that take them
        return self.episode(task, [step.model_copy(update={"advantages": given})])
"""
SCORER = """
import asyncio, json
from hashlib import sha256
from pathlib import Path

from rllm_core.algorithms.group_scorer import GroupScorer, ScorerModel

LOG = Path(__file__).with_name("scores.jsonl")


class Drawn(GroupScorer):
    model = {model}
    frozen_version = {frozen_version}

    async def score(self, group, services):
        scores, versions = {{}}, set()
        for episode in group.episodes:
            drawn = sha256(episode.rollout_id.encode()).digest()
            scores[episode.rollout_id] = drawn[0] / 256 if {is_scored} else None
        if {asks}:
            question = [{{"role": "user", "content": "good?"}}]
            asked = [services.complete(question, seed=group.seed + n, max_response_tokens=2) for n in range(2)]
            versions = {{step.weight_version for step in await asyncio.gather(*asked)}}
        if not group.is_validation:
            with LOG.open("a") as file:
                file.write(json.dumps({{"scores": scores, "versions": sorted(versions)}}) + "\\n")
        return dict(reversed(scores.items()))
"""
IS_SCORED = {
    "none": "True",
    "one": "episode.rollout_index != 1",
    "a group": "sha256(str(group.seed).encode()).digest()[0] % 4",
}
Run = tuple[str, str, str, str]


# An estimator gets the scores of a group whose rollouts may lack some, whoever has given them. test_algorithms.py lets
# each estimator meet each mode.
MEETING = ((0, 2), (0, 3), (1, 3), (2, 3))


def in_pairs() -> list[Run]:
    """Returns runs in which each two values of the `MEETING` settings meet."""
    every = list(product(MODES, ESTIMATORS, ASKED, UNSCORED))
    left = {pair for run in every for pair in pairs_in(run)}
    chosen: list[Run] = []
    while left:
        best = max(every, key=lambda run: len(left & pairs_in(run)))
        chosen.append(best)
        left -= pairs_in(best)
    return chosen


def pairs_in(run: Run) -> set[tuple[int, str, int, str]]:
    return {(one, run[one], other, run[other]) for one, other in MEETING}


def test_each_two_settings_meet() -> None:
    met = {pair for run in in_pairs() for pair in pairs_in(run)}
    sizes = [len(MODES), len(ESTIMATORS), len(ASKED), len(UNSCORED)]
    assert len(met) == sum(sizes[one] * sizes[other] for one, other in MEETING)
    assert {run[1] for run in in_pairs()} == set(ESTIMATORS)
    assert len(in_pairs()) < 36


@pytest.fixture
def plugins() -> PluginManager:
    found = PluginManager.from_environment(no_plugins=True)
    given = (("local", rllm_local), ("renderers", rllm_renderers), ("testing", rllm_devkit.scripted_plugin))
    for name, plugin in given:
        found.register(plugin, name)
    return found


@pytest.fixture
def files(tmp_path: Path, model_folder: Path) -> Callable[..., tuple[str, str]]:
    """Writes a workflow without rewards and a scorer; returns their files."""

    def write(backend: str, asked: str, unscored: str) -> tuple[str, str]:
        engine = f"ScorerModel({'local' if backend == 'local' else 'scripted'!r}, {str(model_folder)!r})"
        scorer = SCORER.format(
            model=engine if asked == "another model" else None,
            frozen_version=0 if asked == "version 0" else None,
            is_scored=IS_SCORED[unscored],
            asks=asked != "nobody",
        )
        (tmp_path / "env.py").write_text(WORKFLOW, encoding="utf-8")
        (tmp_path / "scorer.py").write_text(scorer, encoding="utf-8")
        return str(tmp_path / "env.py"), str(tmp_path / "scorer.py")

    return write


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "estimator", "asked", "unscored"), in_pairs())
def test_whole_runs(
    plugins: PluginManager,
    files: Callable[..., tuple[str, str]],
    model_folder: Path,
    tmp_path: Path,
    mode: str,
    estimator: str,
    asked: str,
    unscored: str,
) -> None:
    backend, more = MODES[mode]
    workflow, scorer = files(backend, asked, unscored)
    own = (f"model.path={model_folder}", "local.device=cpu") if backend == "local" else ()
    settings = (
        "training.steps=3",
        "training.groups_per_step=2",
        "training.rollouts_per_group=4",
        "training.validation_rollouts=4",
        "rollout.max_response_tokens=4",
        f"algorithm.name={estimator}",
        f"algorithm.group_scorer={scorer}",
    )
    config = load_run_config(workflow, plugins, overrides=(*settings, *own, *more), backend=backend)
    folder = tmp_path / "run"
    summary = asyncio.run(launch.train(assemble(config, plugins), folder, resume=False, progress=Progress()))
    assert summary["status"] == "completed"
    assert verify(folder).problems == []
    scored = lines(tmp_path / "scores.jsonl")
    of_group = {next(iter(one["scores"])).split("-")[2]: one for one in scored}
    assert len(of_group) == len(scored), "each group was scored once"
    versions = {version for one in scored for version in one["versions"]}
    # With partial rollouts, the last weights may go live while no group is complete.
    assert (len(versions) > 1) if asked == "policy" else (versions == (set() if asked == "nobody" else {0}))
    events = lines(folder / "events.jsonl")
    recorded = {reward for event in events if event["event"] == "score" for reward in event["rewards"].items()}
    assert recorded >= {score for one in scored for score in one["scores"].items()}
    books = summary["books_by_reason"]
    left_out = sum(score is None for one in scored for score in one["scores"].values())
    assert books.get("filtered", {}).get("unscored", 0) <= left_out
    assert (unscored == "none") == (left_out == 0)
    metrics = lines(folder / "metrics.jsonl")
    trained = [event for event in events if event["event"] == "step"]
    assert len(metrics) == len(trained) == 3
    for event, row in zip(trained, metrics, strict=True):
        rewards = [
            score for group in event["groups"] for score in of_group[str(group)]["scores"].values() if score is not None
        ]
        assert row["reward_mean"] == pytest.approx(fmean(rewards))
        assert row["trajectories"] == len(rewards)
