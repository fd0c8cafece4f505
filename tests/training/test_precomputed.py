"""Tests runs whose advantages come from the workflow: rewards are optional, and reported correctly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rllm_core import hookimpl
from rllm_core.assembly.parts import Parts, assemble, parts_of
from rllm_core.assembly.resolution import load_run_config, resolve_run
from rllm_core.errors import ConfigError
from rllm_core.hosts.inline import Inline
from rllm_core.plugins import PluginManager
from rllm_core.runs import evaluation
from rllm_core.types import Episode, Trajectory
from rllm_devkit.scripted import ScriptedWorkflow
from rllm_viewer.plot import plot_reward

RunScripted = Callable[..., Any]
PRECOMPUTED = "algorithm.name=precomputed"
FILTER = "algorithm.filter_uniform_groups=true"


def credited(reward: float | None, role: str = "agent") -> Callable[[Parts], None]:
    """Gives every token of "yes" credit 1 and every other token -1; the reward does not depend on the answer."""

    def prepare(assembly: Parts) -> None:
        play = assembly.workflow.run

        async def run(task: Any, completer: Any) -> Episode:
            [trajectory] = (await play(task, completer)).trajectories
            steps = []
            for step in trajectory.steps:
                worth = 1.0 if step.text == "yes" else -1.0
                advantages = np.full(len(step.completion_ids), worth, np.float32)
                steps.append(step.model_copy(update={"advantages": advantages}))
            return Episode(task_id=task.task_id, trajectories=[Trajectory(role=role, steps=steps, reward=reward)])

        assembly.workflow.run = run  # type: ignore[method-assign]

    return prepare


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), (FILTER,), ("training.groups_per_forward_backward=1",)])
def test_without_rewards_every_group_is_trained(run_scripted: RunScripted, overrides: tuple[str, ...]) -> None:
    run = run_scripted(PRECOMPUTED, *overrides, prepare=credited(None))
    assert run.error is None
    books = run.summary["books"]
    assert books["trained"] == 6 * 4 * 4
    assert books["filtered"] == books["failed"] == 0
    assert run.summary["quarantined"] == {}
    assert run.summary["retries"] == 0
    assert run.lines("metrics")[-1]["skill"] > 0.6, "what the advantages ask for is learned"


@pytest.mark.slow
def test_without_rewards_none_is_reported(run_scripted: RunScripted) -> None:
    told: dict[str, list[Any]] = {"metrics": [], "validations": []}

    class Observer:
        @hookimpl
        def on_batch_end(self, metrics: Any) -> None:
            told["metrics"].append(metrics)

        @hookimpl
        def on_validation_end(self, metrics: Any) -> None:
            told["validations"].append(metrics)

    run = run_scripted(PRECOMPUTED, FILTER, prepare=credited(None), observers=Observer())
    assert run.error is None
    rows = run.lines("metrics")
    assert len(rows) == len(told["metrics"]) == 6
    for row in (*rows, *told["metrics"], *told["validations"]):
        assert not [name for name in row if "reward" in name or name == "uniform_groups_share"]
    assert [validation["reward_mean"] for validation in run.summary["validation"]] == [None, None]
    picture = plot_reward(run.path)
    assert picture is not None
    assert picture.name == "loss.png"


@pytest.mark.slow
def test_groups_with_equal_rewards_are_filtered_all_the_same(run_scripted: RunScripted) -> None:
    run = run_scripted(PRECOMPUTED, FILTER, "algorithm.refill_filtered_groups=false", prepare=credited(1.0))
    assert run.error is None
    assert run.summary["books_by_reason"]["filtered"] == {"uniform_reward": 6 * 4 * 4}
    assert run_scripted(PRECOMPUTED, path=run.path.with_name("kept"), prepare=credited(1.0)).summary["books"][
        "trained"
    ] == 6 * 4 * 4  # fmt: skip


@pytest.mark.slow
def test_a_role_without_rewards_stays_beside_one_with_them(run_scripted: RunScripted) -> None:
    """The filter drops the role whose equal rewards teach nothing, and keeps this one."""

    def prepare(assembly: Parts) -> None:
        credited(None, role="critic")(assembly)
        play = assembly.workflow.run

        async def run(task: Any, completer: Any) -> Episode:
            [critic] = (await play(task, completer)).trajectories
            [actor] = (await play(task, completer.fork())).trajectories
            actor = actor.model_copy(update={"role": "actor", "reward": 1.0})
            return Episode(task_id=task.task_id, trajectories=[critic, actor])

        assembly.workflow.run = run  # type: ignore[method-assign]

    samples: list[str] = []

    def watched(assembly: Parts) -> None:
        prepare(assembly)
        transform = assembly.backend.transform_to_backend_batch

        def transform_to_backend_batch(batch: Any) -> Any:
            samples.extend(sample.role for sample in batch)
            return transform(batch)

        assembly.backend.transform_to_backend_batch = transform_to_backend_batch  # type: ignore[method-assign]

    # A length penalty changes the input of "grpo", so it is accepted next to an estimator that ignores it.
    settings = (FILTER, "algorithm.roles.critic.name=precomputed", "algorithm.overlong.penalty_tokens=2")
    run = run_scripted(*settings, prepare=watched)
    assert run.error is None
    assert set(samples) == {"critic"}
    assert run.summary["books"]["trained"] == 6 * 4 * 4


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.overlong.penalty_tokens=5",),
        ("algorithm.kl.coefficient=0.1", "algorithm.kl.place=reward"),
    ],
)
def test_what_would_change_no_reward_is_refused(plugins: PluginManager, overrides: tuple[str, ...]) -> None:
    config = load_run_config("say_yes", plugins, overrides=(PRECOMPUTED, *overrides), backend="scripted")
    with pytest.raises(ConfigError, match=r"must be .*: estimator 'precomputed' uses no rewards"):
        assemble(config, plugins)


@pytest.mark.parametrize("engine", [None, "scripted"])
def test_an_evaluation_without_rewards_says_so(plugins: PluginManager, engine: str | None) -> None:
    resolved = resolve_run("say_yes", plugins, overrides=(PRECOMPUTED,), backend="scripted", engine=engine)
    assembly = parts_of(resolved)
    credited(None)(assembly)
    workflow: ScriptedWorkflow = assembly.workflow  # type: ignore[assignment]
    opening = (
        evaluation.engine_of_backend(assembly, None) if engine is None else evaluation.engine_by_name(engine, resolved)
    )
    play = evaluation.evaluate(
        resolved, Inline.of(workflow), opening, split="validation", task_limit=3, samples=2, ks=(1,)
    )
    result = asyncio.run(play)
    assert result["failed"] == 0
    assert result["reward_mean"] is None


@pytest.mark.slow
def test_what_the_command_line_prints_without_rewards(
    run_scripted: RunScripted, capsys: pytest.CaptureFixture[str]
) -> None:
    from rllm_core.cli import eval as evaluated
    from rllm_core.cli import train

    summary = run_scripted(PRECOMPUTED, prepare=credited(None)).summary
    train._print_summary(summary)
    evaluated._print(
        {
            "workflow": "say_yes",
            "split": "train",
            "tasks": 1,
            "rollouts_per_task": 1,
            "unfinished": 0,
            "failed": 0,
            "reward_mean": None,
            "pass_at_k": [],
            "failures": [],
        }
    )
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("spent: ")
    assert said[2:] == [
        "first validation (step 0): reward none",
        "last validation (step 6): reward none",
        "say_yes (train): 1 task x 1 rollout, 0 failed",
        "reward none",
    ]
