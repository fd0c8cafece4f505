"""Tests that invalid numbers are rejected where they enter, naming the task; no backend trains on them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rllm_core import hookimpl, providers
from rllm_core.algorithms.advantages import AdvantageEstimator, Credit
from rllm_core.algorithms.corrections import Correction
from rllm_core.assembly.parts import Parts
from rllm_core.assembly.tasks import TaskStream
from rllm_core.plugins import PluginManager
from rllm_core.runs import launch
from rllm_core.types import Episode, TokenOutput, TrajectoryGroup
from rllm_devkit.scripted import ScriptedBackend, ScriptedEngine

RunScripted = Callable[..., Any]
ONCE = ("training.steps=1", "training.validation_rollouts=0", "say_yes.tasks=3", "rollout.max_attempts=1",
        "rollout.quarantine_after_groups=1")  # fmt: skip
BAD_TASK = "train-1"
NAN, INF = float("nan"), float("inf")


def trained(run: Any) -> bool:
    return bool({"process_backend_batch", "update_policy"} & {*run.assembly.backend.calls.names()})


# --------------------------------------------------------------------------------------------------------------------
# In a rollout: the rollout fails


Change = Callable[[Episode], Episode]


def changes(by_task: Mapping[str, Change]) -> Callable[[Parts], None]:
    """Returns a preparation that changes the workflow's episodes for some tasks."""

    def prepare(assembly: Parts) -> None:
        play = assembly.workflow.run

        async def run(task: Any, completer: Any) -> Episode:
            episode = await play(task, completer)
            return by_task.get(task.task_id, lambda same: same)(episode)

        assembly.workflow.run = run  # type: ignore[method-assign]

    return prepare


def assigned(**fields: Any) -> Change:
    """Assigns to fields of the trajectory."""

    def change(episode: Episode) -> Episode:
        for name, value in fields.items():
            setattr(episode.trajectories[0], name, value)
        return episode

    return change


def assigned_to_step(**fields: Any) -> Change:
    def change(episode: Episode) -> Episode:
        for name, value in fields.items():
            setattr(episode.trajectories[0].steps[0], name, value)
        return episode

    return change


def slipped_in(**fields: Any) -> Change:
    """Replaces fields of the trajectory without validation."""

    def change(episode: Episode) -> Episode:
        return episode.model_copy(update={"trajectories": [episode.trajectories[0].model_copy(update=fields)]})

    return change


def slipped_into_step(**fields: Any) -> Change:
    def change(episode: Episode) -> Episode:
        [step] = episode.trajectories[0].steps
        arrays = {"token_rewards", "logprobs"} & fields.keys()
        values = {
            name: np.full(len(step.completion_ids), fields[name]) if name in arrays else fields[name] for name in fields
        }
        return slipped_in(reward=None, steps=[step.model_copy(update=values)])(episode)

    return change


NO_REWARDS: list[Change] = [
    *(assigned(reward=wrong) for wrong in (NAN, INF, -INF, None, "1", 1e308)),
    *(assigned_to_step(reward=wrong) for wrong in (NAN, INF, "1", 1e308)),
    *(assigned_to_step(token_rewards=[wrong] * 3) for wrong in (NAN, INF, "1", None, 1e39)),
    *(assigned_to_step(token_rewards=wrong) for wrong in ([1.0], 1.0, "111")),
    *(slipped_in(reward=wrong) for wrong in (NAN, INF, None, "1")),
    *(slipped_into_step(reward=wrong) for wrong in (NAN, -INF, None, "1")),
    *(slipped_into_step(token_rewards=wrong) for wrong in (NAN, INF)),
]


@pytest.mark.slow
def test_rewards_that_are_no_numbers(run_scripted: RunScripted) -> None:
    """Every rollout of a task has one bad reward; only the other tasks are trained."""
    wrong = {f"train-{number}": change for number, change in enumerate(NO_REWARDS)}
    run = run_scripted(
        "training.validation_rollouts=0", "rollout.max_attempts=1", "rollout.quarantine_after_groups=1",
        "rollout.max_failure_share=1", f"say_yes.tasks={len(wrong) + 8}", "training.steps=8", prepare=changes(wrong),
    )  # fmt: skip
    assert run.error is None
    errors = [event for event in run.lines("events") if event["event"] == "error"]
    assert {event["task"] for event in errors} == set(run.summary["quarantined"]) == set(wrong)
    assert run.summary["books"]["failed"] == len(errors) == 4 * len(wrong)
    assert run.summary["books"]["trained"] == 8 * 16


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [NAN, -INF, 0.5, "-1", None])
def test_a_logprob_that_is_none(run_scripted: RunScripted, monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    answer = ScriptedEngine._answer

    def wrongly(self: ScriptedEngine, seed: int, *of_request: Any) -> TokenOutput:
        output = answer(self, seed, *of_request)
        if seed % 3:
            return output
        logprobs = np.array([wrong] * len(output.token_ids), None if isinstance(wrong, float) else object)
        return TokenOutput.model_validate({**dict(output), "logprobs": logprobs})

    monkeypatch.setattr(ScriptedEngine, "_answer", wrongly)
    run = run_scripted("training.steps=1", "training.validation_rollouts=0", "rollout.max_attempts=20")
    assert run.error is None
    assert run.summary["retries"] > 0
    errors = [event for event in run.lines("events") if event["event"] == "error"]
    assert all(event["task"].startswith("train-") and "log-probabilities" in event["error"] for event in errors)
    assert run.summary["books"]["trained"] == 16


# --------------------------------------------------------------------------------------------------------------------
# From a plugin: the run stops


class Thirds(AdvantageEstimator):
    """Third-party estimator that is wrong for one task only."""

    answer: Any = None

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[list[Credit]]:
        credit = np.zeros(1)
        return [[self.answer if g.task_id == BAD_TASK else credit for _ in g.trajectories] for g in groups]


class ThirdsOfSteps(Thirds):
    scope = "batch"


class Weights(Correction):
    """Third-party correction that is wrong for one sequence of the step only."""

    answer: Any = None

    def __call__(self, log_ratios: Any, starts: Any) -> Any:
        weights = np.ones(len(log_ratios))
        weights[starts[-1] - 1] = self.answer
        return weights


HERE = "rllm_thirds"  # the name under which the run file selects this module


class Plugin:
    @hookimpl
    def advantage_estimators(self) -> list[providers.AdvantageEstimatorProvider]:
        return [
            providers.AdvantageEstimatorProvider(name=name, load=f"{HERE}:{name}", summary="Wrong.")
            for name in ("thirds", "thirds_of_steps")
        ]

    @hookimpl
    def corrections(self) -> list[providers.CorrectionProvider]:
        return [providers.CorrectionProvider(name="thirds", load=f"{HERE}:Weights", summary="Wrong.")]


@pytest.fixture
def thirds(plugins: PluginManager, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(HERE)
    vars(module).update(thirds=Thirds, thirds_of_steps=ThirdsOfSteps, Weights=Weights)
    monkeypatch.setitem(sys.modules, HERE, module)
    plugins.register(Plugin(), "thirds")


@pytest.mark.slow
@pytest.mark.usefixtures("thirds")
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        *(("thirds", np.array(answer)) for answer in ([NAN], [INF], ["1"], [None], [1.0, 2.0])),
        *(("thirds", answer) for answer in ("1", 3, None)),
        ("thirds_of_steps", np.array([NAN])),
    ],
)
def test_an_advantage_that_is_no_number(
    run_scripted: RunScripted, monkeypatch: pytest.MonkeyPatch, name: str, answer: Any
) -> None:
    monkeypatch.setattr(Thirds, "answer", answer)
    run = run_scripted(*ONCE, f"algorithm.name={name}")
    assert f"task {BAD_TASK!r}" in str(run.error)
    assert name in str(run.error)
    assert not trained(run)


@pytest.mark.slow
@pytest.mark.usefixtures("thirds")
@pytest.mark.parametrize("answer", [NAN, INF, -1.0, 1e300])
def test_a_weight_that_is_none(run_scripted: RunScripted, monkeypatch: pytest.MonkeyPatch, answer: float) -> None:
    monkeypatch.setattr(Weights, "answer", answer)
    monkeypatch.setattr(ScriptedBackend, "capability_overrides", {"policies": frozenset({"current", "proximal"})})
    run = run_scripted(*ONCE, "algorithm.proximal_policy=forward", 'algorithm.corrections=["thirds"]')
    [consumed] = [event["groups"] for event in run.lines("events") if event["event"] == "consume"]
    tasks = {event["group"]: event["task"] for event in run.lines("events") if event["event"] == "dispatch"}
    complaint = f"task {tasks[consumed[-1]]!r}: correction 'thirds' (thirds) must return one finite weight >= 0"
    assert complaint in str(run.error)
    assert not trained(run)


@pytest.mark.slow
@pytest.mark.parametrize("advantage", [NAN, INF])
def test_precomputed_advantages_that_are_no_numbers(run_scripted: RunScripted, advantage: float) -> None:
    def given(value: float) -> Change:
        def change(episode: Episode) -> Episode:
            [step] = episode.trajectories[0].steps
            values = np.full(len(step.completion_ids), value)
            return slipped_in(steps=[step.model_copy(update={"advantages": values})])(episode)

        return change

    by_task = {f"train-{number}": given(1.0) for number in range(3)} | {BAD_TASK: given(advantage)}
    run = run_scripted(*ONCE, "algorithm.name=precomputed", prepare=changes(by_task))
    assert f"task {BAD_TASK!r}" in str(run.error)
    assert not trained(run)


IN_LOSS, IN_REWARD = ("algorithm.kl.coefficient=0.1",), ("algorithm.kl.coefficient=0.1", "algorithm.kl.place=reward")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "overrides", "wrong"),
    [
        *(
            ("proximal", ("algorithm.proximal_policy=forward",), wrong)
            for wrong in (NAN, INF, 0.5, "short", "fewer", "none")
        ),
        ("reference", IN_LOSS, -INF),
        ("reference", IN_REWARD, NAN),
        ("current", IN_REWARD, NAN),
    ],
)
def test_a_logprob_of_the_backend_that_is_none(
    run_scripted: RunScripted, monkeypatch: pytest.MonkeyPatch, policy: str, overrides: tuple[str, ...], wrong: Any
) -> None:
    able = {"policies": frozenset({"current", "proximal", "reference"}), "kl_loss": True}
    monkeypatch.setattr(ScriptedBackend, "capability_overrides", able)
    bad_groups: set[int] = set()

    async def compute_logprobs(self: ScriptedBackend, samples: Any, asked: str = "current") -> Any:
        computed = [sample.logprobs for sample in samples]
        if asked != policy:
            return computed
        if wrong in ("fewer", "none"):
            return computed[1:] if wrong == "fewer" else None
        index = next(i for i, sample in enumerate(samples) if sample.group_id in bad_groups)
        computed[index] = computed[index][1:] if wrong == "short" else np.full(len(computed[index]), wrong)
        return computed

    monkeypatch.setattr(ScriptedBackend, "compute_logprobs", compute_logprobs)
    build = launch.Trainer.__init__

    def remember(self: Any, parts: Any) -> None:
        build(self, parts)
        stream = TaskStream(parts.tasks.of("train"), parts.config.training.seed)
        bad_groups.update(ordinal for ordinal in range(12) if stream[ordinal].task_id == BAD_TASK)

    monkeypatch.setattr(launch.Trainer, "__init__", remember)
    run = run_scripted(*ONCE, *overrides)
    assert f"compute_logprobs({policy!r})" in str(run.error)
    assert wrong in ("fewer", "none") or f"task {BAD_TASK!r}" in str(run.error)
    assert not trained(run)
