"""Tests estimators in the loop: one per role, and equal advantages for equal groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rllm_core import hookimpl
from rllm_core.algorithms.advantages import AdvantageEstimator, RoleEstimators
from rllm_core.algorithms.grouping import group_trajectories
from rllm_core.algorithms.samples import training_samples
from rllm_core.algorithms.shaping import OverlongPenalty
from rllm_core.assembly.parts import Parts
from rllm_core.builtin.estimators.batch import PRPO, ReinforcePlusPlus, ReinforcePlusPlusBaseline
from rllm_core.builtin.estimators.outcome import GRPO, RLOO, DrGRPO, Reinforce
from rllm_core.builtin.estimators.turns import ReturnToGo
from rllm_core.errors import ConfigError, UserError
from rllm_core.run_folder.progress import Progress
from rllm_core.types import Episode, Floats, TrainingSample, Trajectory
from rllm_devkit.scripted import ScriptedBackend, ScriptedBatch

RunScripted = Callable[..., Any]
ESTIMATORS: dict[str, type[AdvantageEstimator]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "rloo": RLOO,
    "reinforce": Reinforce,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
    "prpo": PRPO,
    "return_to_go": ReturnToGo,
}
MODES: dict[str, tuple[str, tuple[str, ...]]] = {
    "synchronous": ("scripted", ()),
    "colocated": ("scripted_colocated", ()),
    "streamed": ("scripted", ("training.groups_per_forward_backward=1",)),
    "in flight": (
        "scripted",
        (
            "training.staleness_threshold=2",
            "training.partial_rollout=true",
            "training.trigger_parameter_sync_step=2",
            "training.groups_per_forward_backward=2",
        ),
    ),
}
SMALL = ("training.steps=4", "training.groups_per_step=2", "training.rollouts_per_group=3", "say_yes.turns=2",
         "training.validation_rollouts=0")  # fmt: skip


class Watched:
    """Episodes of a run, and the samples its backend received."""

    def __init__(self) -> None:
        self.episodes: dict[str, Episode] = {}
        self.samples: list[TrainingSample] = []

    @hookimpl
    def on_episode_finished(self, episode: Episode) -> None:
        self.episodes[episode.rollout_id] = episode

    def prepare(self, assembly: Parts) -> None:
        transform = assembly.backend.transform_to_backend_batch

        def transform_to_backend_batch(samples: Any) -> ScriptedBatch:
            self.samples += samples
            return transform(samples)

        assembly.backend.transform_to_backend_batch = transform_to_backend_batch  # type: ignore[method-assign]

    def expected(self, run: Any, estimators: RoleEstimators) -> dict[tuple[str, str], Floats]:
        """Returns advantages by rollout and role, computed from the episodes of each optimizer step together."""
        result = {}
        for event in run.lines("events"):
            if event["event"] != "step":
                continue
            groups = []
            for ordinal in event["groups"]:
                played = [e for e in self.episodes.values() if e.rollout_id.split("-")[2] == str(ordinal)]
                played.sort(key=lambda episode: episode.rollout_index)
                groups += group_trajectories(ordinal, played[0].task_id, played)
            for group, credits in zip(groups, estimators(groups), strict=True):
                for sample in training_samples(group, credits):
                    result[sample.rollout_id, sample.role] = sample.advantages
        return result

    def check(self, run: Any, estimators: RoleEstimators) -> None:
        assert run.error is None
        expected = self.expected(run, estimators)
        assert len(self.samples) == len(expected) == run.summary["books"]["trained"] * len(estimators.by_role or [0])
        for sample in self.samples:
            wanted = expected[sample.rollout_id, sample.role]
            assert sample.advantages.tolist() == pytest.approx(wanted.tolist(), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "in flight") for name in ESTIMATORS),
        *((name, mode) for name in ("grpo", "reinforce_plus_plus_baseline") for mode in MODES if mode != "in flight"),
    ],
)
def test_the_same_groups_get_the_same_advantages(run_scripted: RunScripted, name: str, mode: str) -> None:
    backend, overrides = MODES[mode]
    watched = Watched()
    run = run_scripted(
        *SMALL, *overrides, f"algorithm.name={name}", backend=backend, observers=watched, prepare=watched.prepare
    )
    watched.check(run, RoleEstimators(ESTIMATORS[name]()))
    assert any(sample.advantages.any() for sample in watched.samples)
    if name not in ("reinforce", "prpo"):
        assert len({float(value) for sample in watched.samples for value in sample.advantages}) > 2


def solver_and_judge(assembly: Parts) -> None:
    """Turns the workflow into two roles: the judge is rewarded for agreeing with the solver's reward."""
    play = assembly.workflow.run

    async def run(task: Any, completer: Any) -> Episode:
        solved, judged = await play(task, completer), await play(task, completer.fork())
        [solver], [judge] = solved.trajectories, judged.trajectories
        agrees = float((judge.reward == 1) == (solver.reward == 1))
        roles = [
            Trajectory(role="solver", steps=solver.steps, reward=solver.reward),
            Trajectory(role="judge", steps=judge.steps, reward=agrees),
        ]
        return Episode(task_id=task.task_id, trajectories=roles, is_correct=solved.is_correct)

    assembly.workflow.run = run  # type: ignore[method-assign]


ROLES = (
    "algorithm.name=rloo",
    "algorithm.roles.judge.name=reinforce_plus_plus_baseline",
    "algorithm.roles.solver.name=grpo",
    "algorithm.roles.solver.estimator_options.std=sample",
)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_each_role_is_credited_by_its_own_estimator(run_scripted: RunScripted, mode: str) -> None:
    backend, overrides = MODES[mode]
    watched = Watched()

    def prepare(assembly: Parts) -> None:
        solver_and_judge(assembly)
        watched.prepare(assembly)

    run = run_scripted(*SMALL, *overrides, *ROLES, backend=backend, observers=watched, prepare=prepare)
    estimators = RoleEstimators(RLOO(), {"judge": ReinforcePlusPlusBaseline(), "solver": GRPO({"std": "sample"})})
    watched.check(run, estimators)
    assert {sample.role for sample in watched.samples} == {"solver", "judge"}
    trained: dict[str, list[float]] = {"solver": [], "judge": []}
    for episode in watched.episodes.values():
        for trajectory in episode.trajectories:
            trained[trajectory.role].append(trajectory.total_reward)
    rows = run.lines("metrics")
    for role, rewards in trained.items():
        assert np.mean([row[f"reward_mean/{role}"] for row in rows]) == pytest.approx(np.mean(rewards))
    both = [np.mean([row["reward_mean/solver"], row["reward_mean/judge"]]) for row in rows]
    assert [row["reward_mean"] for row in rows] == pytest.approx(both)


@pytest.mark.slow
def test_validations_have_the_mean_reward_of_trajectories_as_training_has(run_scripted: RunScripted) -> None:
    def prepare(assembly: Parts) -> None:
        play = assembly.workflow.run

        async def run(task: Any, completer: Any) -> Episode:
            episodes = [await play(task, completer), await play(task, completer.fork())]
            rewards = {"solver": 3.0, "judge": 1.0}
            parts = [
                Trajectory(role=role, steps=episode.trajectories[0].steps, reward=reward)
                for episode, (role, reward) in zip(episodes, rewards.items(), strict=True)
            ]
            return Episode(task_id=task.task_id, trajectories=parts)

        assembly.workflow.run = run  # type: ignore[method-assign]

    run = run_scripted(prepare=prepare)
    assert {row["reward_mean"] for row in run.lines("metrics")} == {2.0}
    assert {validation["reward_mean"] for validation in run.summary["validation"]} == {2.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])  # one number per step and one per token
def test_a_weight_scales_the_advantages_of_its_role_only(run_scripted: RunScripted, name: str) -> None:
    watched = Watched()

    def prepare(assembly: Parts) -> None:
        solver_and_judge(assembly)
        watched.prepare(assembly)

    roles = (f"algorithm.roles.judge={{name='{name}', weight=0.25}}", "algorithm.roles.solver.name=grpo")
    run = run_scripted(*SMALL, *roles, observers=watched, prepare=prepare)
    unweighted = watched.expected(run, RoleEstimators(GRPO(), {"judge": ESTIMATORS[name]()}))
    assert len(watched.samples) == len(unweighted)
    for sample in watched.samples:
        factor = 0.25 if sample.role == "judge" else 1.0
        wanted = unweighted[sample.rollout_id, sample.role] * factor
        assert sample.advantages.tolist() == pytest.approx(wanted.tolist(), abs=1e-6)
    assert any(sample.advantages.any() for sample in watched.samples if sample.role == "judge")


@pytest.mark.slow
def test_one_role_has_no_metrics_of_its_own(run_scripted: RunScripted) -> None:
    assert not any("/" in name for name in run_scripted("training.steps=1").lines("metrics")[0])


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("algorithm.roles.judge.name=grpoo", "'grpo'"),
        (
            "algorithm.roles.judge={name='grpo', estimator_options={std='biased'}}",
            "algorithm.roles.judge.estimator_options",
        ),
        ("algorithm.roles.judge={name='rloo', estimator_options={epsilon=0.1}}", "epsilon"),
        ("algorithm.name=reinforce_plusplus", "'reinforce_plus_plus'"),
    ],
)
def test_what_is_misspelt_says_where(run_scripted: RunScripted, override: str, complaint: str) -> None:
    with pytest.raises(UserError) as raised:
        run_scripted(override)
    assert complaint in str(raised.value)


class Notes(Progress):
    """Display that records its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.slow
def test_a_role_that_does_not_occur_is_said(run_scripted: RunScripted) -> None:
    """Roles are known only once the workflow runs, so a misspelled role cannot be rejected earlier."""
    progress = Notes()
    misspelt = ("algorithm.roles.solver.name=rloo", "algorithm.roles.jugde.name=rloo")
    assert run_scripted(*SMALL, *misspelt, prepare=solver_and_judge, progress=progress).error is None
    said = [note for note in progress.notes if note.startswith("algorithm.roles")]
    assert said == ["algorithm.roles.jugde matches no group so far: the first groups have roles judge, solver"]


@pytest.mark.slow
def test_overlong_responses_are_punished_in_advantages_and_not_in_metrics(run_scripted: RunScripted) -> None:
    """Penalizes "yes", which is longer than "no", by more than its reward."""
    punished = ("algorithm.name=dr_grpo", "algorithm.overlong.max_tokens=4", "algorithm.overlong.penalty_tokens=1",
                "algorithm.overlong.penalty=3.0")  # fmt: skip
    watched = Watched()
    options = (*SMALL, "say_yes.turns=1", *punished)
    run = run_scripted(*options, observers=watched, prepare=watched.prepare)
    watched.check(run, RoleEstimators(DrGRPO(), shaped=OverlongPenalty(4, 1, 3.0)))
    rows = run.lines("metrics")
    rewards = [episode.trajectories[0].total_reward for episode in watched.episodes.values()]
    assert np.mean([row["reward_mean"] for row in rows]) == pytest.approx(np.mean(rewards))
    assert all(0 <= row["reward_mean"] <= 1 for row in rows)
    assert rows[-1]["skill"] < 0.5, "it learns the short answer"


def test_a_penalty_that_begins_before_the_first_token_is_refused(run_scripted: RunScripted) -> None:
    with pytest.raises(ConfigError, match="penalty_tokens = 5000 must not exceed"):
        run_scripted("algorithm.overlong.penalty_tokens=5000")


@pytest.mark.slow
def test_a_backend_without_advantages_of_tokens_is_told_before_anything_starts(
    run_scripted: RunScripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedBackend, "capability_overrides", {"per_token_advantages": False})
    for name in ("reinforce_plus_plus", "precomputed"):
        with pytest.raises(ConfigError, match=name):
            run_scripted(f"algorithm.name={name}")
    assert run_scripted("training.steps=1", "algorithm.name=reinforce_plus_plus_baseline").error is None


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "return_to_go"])
def test_what_compares_within_a_group_is_told_that_there_is_none(run_scripted: RunScripted, name: str) -> None:
    with pytest.raises(ConfigError, match="rollouts_per_group = 1 is too small"):
        run_scripted(f"algorithm.name={name}", "training.rollouts_per_group=1")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reinforce", "reinforce_plus_plus", "prpo"])
def test_what_does_not_trains_single_rollouts(run_scripted: RunScripted, name: str) -> None:
    run = run_scripted(f"algorithm.name={name}", "training.rollouts_per_group=1", "training.groups_per_step=8")
    assert run.error is None
    assert run.lines("metrics")[-1]["skill"] > 0.5


@pytest.mark.slow
def test_a_lone_survivor_is_filtered_and_not_pushed(run_scripted: RunScripted) -> None:
    """If one of two rollouts is excluded by its termination reason, the other has no baseline."""

    def prepare(assembly: Parts) -> None:
        play = assembly.workflow.run

        async def run(task: Any, completer: Any) -> Episode:
            episode = await play(task, completer)
            reason = "max_turns_exceeded" if episode.is_correct else "done"
            return episode.model_copy(update={"termination_reason": type(episode.termination_reason)(reason)})

        assembly.workflow.run = run  # type: ignore[method-assign]

    left_out = ("training.rollouts_per_group=2", 'algorithm.filter_termination_reasons=["max_turns_exceeded"]')
    run = run_scripted(*left_out, prepare=prepare)
    assert run.error is None
    reasons = run.summary["books_by_reason"]["filtered"]
    assert reasons["too_few_trajectories"] > 0
    assert reasons["termination_reason"] > 0
    for row in run.lines("metrics"):
        assert row["trajectories"] == 2 * row["groups"] == 2 * 4
