"""Tests supervised training through the whole loop, on the scripted backend."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rllm_workflows

from rllm_core.assembly.parts import Parts, assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.errors import ConfigError
from rllm_core.plugins import PluginManager
from rllm_core.types import Step
from rllm_devkit.scripted import ScriptedBackend

RunScripted = Callable[..., Any]
Sft = Callable[..., Any]


def write(path: Path, answers: list[str]) -> str:
    chats = [
        [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": answer}]
        for number, answer in enumerate(answers)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return str(path)


@pytest.fixture
def plugins(plugins: PluginManager) -> PluginManager:
    plugins.register(rllm_workflows, "workflows")
    return plugins


@pytest.fixture
def sft(run_scripted: RunScripted, tmp_path: Path) -> Sft:
    """Trains the scripted policy on ten rows, all ``yes``."""
    train, held_out = write(tmp_path / "train.jsonl", ["yes"] * 10), write(tmp_path / "test.jsonl", ["yes", "no"])
    data = (f"sft.train={train}", f"sft.validation={held_out}", "training.rollouts_per_group=1")

    def run(*overrides: str, **more: Any) -> Any:
        return run_scripted(*data, *overrides, target="sft", **more)

    return run


@pytest.mark.slow
def test_the_policy_learns_what_is_written(sft: Sft) -> None:
    run = sft("training.steps=20", "training.validate_every_steps=10")
    assert run.error is None
    backend = run.assembly.backend
    assert isinstance(backend, ScriptedBackend)
    assert backend.skill == pytest.approx(0.99)
    assert backend.rollout_engine is not None
    assert backend.rollout_engine.requests == 0
    books = run.summary["books"]
    assert books["dispatched"] == books["trained"] == 80
    tokens = len(b"yes\0") + len(b"no\0")
    expected = -(math.log(0.5) + math.log(0.5)) / tokens
    first, *_, last = run.summary["validation"]
    assert first["nll_per_token"] == pytest.approx(expected)
    assert last["nll_per_token"] == pytest.approx(-(math.log(0.99) + math.log(0.01)) / tokens, rel=1e-4)
    assert [v["rollouts"] for v in run.summary["validation"]] == [2, 2, 2], "each held-out row once, not ten times"
    assert {v["reward_mean"] for v in run.summary["validation"]} == {None}


@pytest.mark.slow
def test_no_reward_is_invented(sft: Sft) -> None:
    run = sft()
    for line in run.lines("metrics"):
        assert not {name for name in line if "reward" in name or name in ("solved", "uniform_groups_share")}
        assert line["staleness_max"] == 0
        assert line["sampled_tokens"] == 4 * len(b"yes\0")
    assert "reward_mean" not in (run.path / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_every_row_comes_once_per_epoch(sft: Sft) -> None:
    run = sft("training.steps=5")
    tasks = [event["task"] for event in run.lines("events") if event["event"] == "dispatch"]
    rows = {f"train.jsonl:{number}" for number in range(1, 11)}
    assert set(tasks[:10]) == set(tasks[10:]) == rows
    assert tasks[:10] != tasks[10:] != sorted(tasks[10:])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["scripted", "scripted_colocated"])
def test_a_resumed_run_is_one_that_was_never_stopped(sft: Sft, tmp_path: Path, backend: str) -> None:
    whole = sft("training.steps=8", backend=backend, path=tmp_path / "whole")
    settings = ("training.steps=8", "training.checkpoint_every_steps=3")

    def fails(assembly: Parts) -> None:
        original = assembly.backend.update_policy

        async def update(step: Any) -> Any:
            if step.step == 5:
                raise RuntimeError("made to fail")
            return await original(step)

        assembly.backend.update_policy = update  # type: ignore[method-assign]

    broken = sft(*settings, backend=backend, path=tmp_path / "broken", prepare=fails)
    assert broken.error is not None
    again = sft(*settings, backend=backend, path=tmp_path / "broken", resume=True)
    assert again.error is None
    assert again.lines("metrics") == whole.lines("metrics")
    assert again.summary["validation"] == whole.summary["validation"]


@pytest.mark.slow
def test_asynchronous_rows_are_as_old_as_their_dispatch(sft: Sft) -> None:
    run = sft("training.steps=8", "training.staleness_threshold=1", "training.staleness=strict")
    assert run.error is None
    assert 0 < max(line["staleness_max"] for line in run.lines("metrics")) <= 1


@pytest.mark.slow
def test_rows_that_are_too_long_are_left_out_and_counted(sft: Sft, tmp_path: Path) -> None:
    train = write(tmp_path / "long.jsonl", ["yes", "y" * 500, "yes"])
    settings = (f"sft.train={train}", "training.groups_per_step=2", "training.steps=4", "sft.max_tokens=100")
    run = sft(*settings, "sft.too_long=skip")
    assert run.error is None
    assert run.summary["books_by_reason"]["filtered"] == {"termination_reason": 4}
    assert run.summary["books"]["trained"] == 8
    stopped = sft(*settings, path=tmp_path / "stopped")
    assert isinstance(stopped.error, ConfigError)
    assert "long.jsonl line 2 has" in str(stopped.error)


@pytest.mark.slow
def test_masks_and_weights_reach_the_backend(sft: Sft, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    path = tmp_path / "weighted.jsonl"
    path.write_text(json.dumps({"messages": chat, "weight": 0.5}) + "\n")
    half = sft(f"sft.train={path}", "training.steps=1").assembly.backend
    whole = sft("training.steps=1", path=tmp_path / "whole").assembly.backend
    assert isinstance(half, ScriptedBackend)
    assert isinstance(whole, ScriptedBackend)
    assert half.skill - 0.5 == pytest.approx((whole.skill - 0.5) / 2)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["algorithm.name=grpo"], "samples none; remove \\[algorithm\\], or set algorithm.name = 'sft'"),
        (["algorithm.loss=reinforce"], "for target tokens, use cross_entropy"),
        (["training.rollouts_per_group=4"], "raise training.groups_per_step"),
        (["rollout.temperature=0.7"], "rollout.temperature = 0.7 must be 1"),
        (["algorithm.filter_uniform_groups=true"], "filter_uniform_groups must be false: estimator 'sft' uses no"),
        (["algorithm.overlong.penalty_tokens=5"], "overlong.penalty_tokens must be 0"),
        (["sft.train=nowhere.jsonl"], "sft.train: nowhere.jsonl does not exist"),
        (["sft.method=cumulatve"], "sft.method = \"cumulatve\": must be"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(
    plugins: PluginManager, tmp_path: Path, overrides: list[str], complaint: str
) -> None:
    train = write(tmp_path / "train.jsonl", ["yes"])
    with pytest.raises(ConfigError, match=complaint) as raised:
        assemble(
            load_run_config("sft", plugins, overrides=[f"sft.train={train}", *overrides], backend="scripted"), plugins
        )
    assert "\n" not in str(raised.value)


def test_the_likelihood_of_a_workflow_that_samples_is_not_maximised(plugins: PluginManager) -> None:
    overrides = ["algorithm.name=sft", "algorithm.loss=cross_entropy"]
    config = load_run_config("say_yes", plugins, overrides=overrides, backend="scripted")
    with pytest.raises(ConfigError, match=r"workflow 'say_yes' samples from the model; set workflow = 'sft'"):
        assemble(config, plugins)


def test_validation_needs_log_probabilities(
    plugins: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedBackend, "capability_overrides", {"policies": frozenset()})
    train = write(tmp_path / "train.jsonl", ["yes"])
    config = load_run_config("sft", plugins, overrides=[f"sft.train={train}"], backend="scripted")
    with pytest.raises(ConfigError, match=r"training.validation_rollouts must be 0: backend 'scripted'"):
        assemble(config, plugins)


def test_a_dry_run_says_how_many_epochs_it_is(plugins: PluginManager, tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", ["yes"] * 10)
    overrides = [f"sft.train={train}", "training.steps=5", "training.groups_per_step=3"]
    assembly = assemble(load_run_config("sft", plugins, overrides=overrides, backend="scripted"), plugins)
    assert "5 steps train 15 rows, 1.5 epochs of 10" in assembly.notes


def test_it_is_not_evaluated(plugins: PluginManager, tmp_path: Path) -> None:
    from rllm_core.runs import evaluation

    config = load_run_config(
        "sft", plugins, overrides=[f"sft.train={write(tmp_path / 'a.jsonl', ['yes'])}"], backend="scripted"
    )
    assembly = assemble(config, plugins)
    opening = evaluation.engine_of_backend(assembly, None)
    with pytest.raises(ConfigError, match="workflow 'sft' never calls the model"):
        asyncio.run(
            evaluation.evaluate(
                assembly.resolved, assembly.host, opening, split="train", task_limit=1, samples=1, ks=(1,)
            )
        )


@pytest.mark.slow
def test_a_mixed_workflow_learns_each_role_its_own_way(run_scripted: RunScripted) -> None:
    def with_an_expert(assembly: Parts) -> None:
        original = assembly.workflow.run

        async def run(task: Any, completer: Any) -> Any:
            episode = await original(task, completer)
            said = episode.trajectories[0].steps[0]
            written = Step(prompt_ids=said.prompt_ids, completion_ids=[*b"yes", 257])
            expert = episode.trajectories[0].model_copy(update={"role": "expert", "steps": [written], "reward": None})
            return episode.model_copy(update={"trajectories": [*episode.trajectories, expert]})

        assembly.workflow.run = run  # type: ignore[method-assign]

    roles = ("algorithm.roles.expert.name=sft", "algorithm.loss=cross_entropy", "training.steps=4")
    run = run_scripted(*roles, prepare=with_an_expert)
    assert run.error is None
    first = run.lines("metrics")[0]
    assert first["trajectories"] == 2 * 16
    assert 0 < first["reward_mean"] < 1, "the expert's missing reward is no reward of 0"
    assert run.summary["validation"][0]["nll_per_token"] == pytest.approx(-math.log(0.5) / 4)
    assert run.summary["validation"][0]["reward_mean"] is not None
