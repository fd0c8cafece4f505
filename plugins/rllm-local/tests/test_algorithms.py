"""Every estimator with every loss: a gradient of its own; whole runs of each, synchronous and asynchronous.

Estimators and losses are taken from the hooks, so that a new one is covered by being registered. Those that learn what
others wrote, or from a teacher, need other runs than these and have tests of their own. `make test-exhaustive` makes a
whole run of every combination.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import rllm_local
import rllm_renderers
import torch
from rllm_local.backend import LocalBackend
from rllm_local.training import LocalTrainer
from transformers import AutoModelForCausalLM

from rllm_core import hookimpl, providers
from rllm_core.algorithms.advantages import RoleEstimators
from rllm_core.algorithms.aggregation import Aggregation
from rllm_core.algorithms.corrections import Correction
from rllm_core.algorithms.samples import training_samples
from rllm_core.algorithms.torch_losses import LossInputs
from rllm_core.assembly.parts import assemble
from rllm_core.assembly.resolution import load_run_config
from rllm_core.builtin.losses import ReinforceLoss
from rllm_core.config import OptimizerConfig
from rllm_core.engine import Completer
from rllm_core.plugins import PluginManager
from rllm_core.run_folder.progress import Progress
from rllm_core.runs import launch
from rllm_core.types import Episode, Step, Task, TrainingSample, Trajectory, TrajectoryGroup
from rllm_core.workflow import Split, Workflow
from rllm_viewer.verify import verify

OWN = PluginManager.from_environment(no_plugins=True)


def classes(kind: Any) -> dict[str, Any]:
    return {name: OWN.load(provided) for name, provided in sorted(OWN.providers(kind).items())}


LOSSES = classes(providers.PolicyLossProvider)
ESTIMATORS = {
    name: found
    for name, found in classes(providers.AdvantageEstimatorProvider).items()
    if not found.learns_written and not found.needs_teacher
}
# An untrained model gives every token a small probability, which no step moves by 0.2.
LOSS_OPTIONS: dict[str, dict[str, float]] = {"dppo_tv": {"limit_low": 5e-4, "limit_high": 5e-4}}
ALIKE = {frozenset({"reinforce", "cross_entropy"})}
"""Losses with the same gradient on any policy; only their values differ."""


# --------------------------------------------------------------------------------------------------------------------
# Gradients


def sampled_groups() -> list[TrajectoryGroup]:
    """Returns six groups of four trajectories with one to three turns, with rewards per turn and at the end."""
    rng = np.random.default_rng(0)
    return [
        TrajectoryGroup(
            group_id=number,
            task_id=f"task-{number}",
            trajectories=[
                Trajectory(steps=random_steps(rng, turns), reward=float(rng.integers(-1, 2))) for turns in (1, 2, 2, 3)
            ],
            rollout_ids=list("abcd"),
            weight_version=0,
        )
        for number in range(6)
    ]


def random_steps(rng: np.random.Generator, turns: int) -> list[Step]:
    steps: list[Step] = []
    ids = rng.integers(10, 250, 6).tolist()
    for turn in range(turns):
        completion = rng.integers(10, 250, int(rng.integers(2, 6))).tolist()
        steps.append(
            Step(
                prompt_ids=ids,
                completion_ids=completion,
                logprobs=[-5.0] * len(completion),
                weight_version=0,
                reward=float(turn) / 4,
                advantages=rng.normal(size=len(completion)),
            )
        )
        ids = [*ids, *completion, 5]
    return steps


@pytest.fixture
def gradient(model_folder: Path) -> Callable[..., npt.NDArray[np.float64]]:
    """Returns the gradient of one step; ``spread`` is the distance from sampling policy to trained policy."""
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()

    def trainer(loss: str) -> LocalTrainer:
        return LocalTrainer(
            model=model,
            loss=LOSSES[loss](LOSS_OPTIONS.get(loss, {})),
            aggregation=Aggregation("token_mean"),
            temperature=1.0,
            optimizer_config=OptimizerConfig(),
            share_prefixes=True,
            max_batch_tokens=4096,
        )

    @cache
    def samples(estimator: str, spread: float) -> list[TrainingSample]:
        groups = sampled_groups()
        credits = RoleEstimators(ESTIMATORS[estimator]())(groups)
        found = [s for group, credit in zip(groups, credits, strict=True) for s in training_samples(group, credit)]
        rng = np.random.default_rng(1)
        current = trainer("reinforce").logprobs(found)
        return [
            s.model_copy(update={"logprobs": np.minimum(c + rng.normal(0, spread, len(c)), 0).astype(np.float32)})
            for s, c in zip(found, current, strict=True)
        ]

    def compute(estimator: str, loss: str, spread: float) -> npt.NDArray[np.float64]:
        built = trainer(loss)
        built.forward_backward(built.batch(samples(estimator, spread), skip_zero_advantages=True), 0.0)
        gradients = [p.grad.flatten() for p in built.parameters.values() if p.grad is not None]
        return torch.cat(gradients).double().numpy()

    return compute


def differ(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> float:
    return float(np.abs(left - right).max() / max(np.abs(left).max(), np.abs(right).max()))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_losses_differ_where_their_formulas_do(gradient: Callable[..., Any], estimator: str) -> None:
    off_policy = {loss: gradient(estimator, loss, 1.0) for loss in LOSSES}
    assert all(np.abs(found).max() > 1e-4 for found in off_policy.values())
    for one, other in combinations(LOSSES, 2):
        if frozenset({one, other}) in ALIKE:
            assert differ(off_policy[one], off_policy[other]) < 1e-5, f"{one} and {other}"
        else:
            assert differ(off_policy[one], off_policy[other]) > 1e-3, f"{one} and {other}"


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_on_policy_all_losses_are_one(gradient: Callable[..., Any], estimator: str) -> None:
    on_policy = {loss: gradient(estimator, loss, 0.0) for loss in LOSSES}
    for loss, found in on_policy.items():
        assert differ(found, on_policy["reinforce"]) < 1e-4, loss


@pytest.mark.parametrize("loss", LOSSES)
def test_estimators_differ(gradient: Callable[..., Any], loss: str) -> None:
    found = {estimator: gradient(estimator, loss, 1.0) for estimator in ESTIMATORS}
    for one, other in combinations(ESTIMATORS, 2):
        assert differ(found[one], found[other]) > 1e-3, f"{one} and {other}"


# --------------------------------------------------------------------------------------------------------------------
# Whole runs


class Graded(Workflow):
    """Two turns; the reward is the share of even tokens. Tokens have advantages for estimators that use them."""

    name: ClassVar[str] = "graded"

    def tasks(self, split: Split) -> list[Task]:
        return [Task(task_id=f"{split}-{letter}", data={"letter": letter}) for letter in "abcd"]

    async def run(self, task: Task, completer: Completer) -> Episode:
        messages: list[Any] = [{"role": "user", "content": task.data["letter"]}]
        steps = [await completer.complete(messages)]
        messages += [steps[0].response, {"role": "user", "content": "more"}]
        steps.append(await completer.complete(messages))
        tokens = np.concatenate([step.completion_ids for step in steps])
        graded = [s.model_copy(update={"advantages": (s.completion_ids % 5 - 2).astype(np.float32)}) for s in steps]
        return self.episode(task, graded, reward=float((tokens % 2 == 0).mean()))


class Doubled(ReinforceLoss):
    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        return 2 * super().__call__(inputs)

    def clipped(self, inputs: LossInputs) -> torch.Tensor:
        return inputs.advantages > 0


class Halved(Correction):
    def __call__(self, log_ratios: Any, starts: Any) -> Any:
        return np.full(len(log_ratios), 0.5)


class Plugin:
    @hookimpl
    def workflows(self) -> list[providers.WorkflowProvider]:
        return [providers.WorkflowProvider(name="graded", load="graded:Graded", summary="Even tokens.")]

    @hookimpl
    def policy_losses(self) -> list[providers.PolicyLossProvider]:
        return [
            providers.PolicyLossProvider(name="doubled", load="graded:Doubled", summary="Twice the policy gradient.")
        ]

    @hookimpl
    def corrections(self) -> list[providers.CorrectionProvider]:
        return [providers.CorrectionProvider(name="halved", load="graded:Halved", summary="Half of everything.")]


MODES = {
    "synchronous": ("local.generation=colocated",),
    "asynchronous": (
        "local.generation=separated",
        "training.staleness_threshold=1",
        "training.partial_rollout=true",
        "training.groups_per_forward_backward=1",
    ),
}


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, model_folder: Path, tmp_path: Path) -> Callable[..., list[dict[str, float]]]:
    monkeypatch.setitem(sys.modules, "graded", sys.modules[__name__])  # pytest's name for it is not importable.
    plugins = PluginManager.from_environment(no_plugins=True)
    for name, plugin in (("local", rllm_local), ("renderers", rllm_renderers), ("graded", Plugin())):
        plugins.register(plugin, name)

    def run(*overrides: str, folder: str = "run") -> list[dict[str, float]]:
        """Returns the metrics of each step."""
        settings = (
            f"model.path={model_folder}",
            "local.device=cpu",
            "training.steps=2",
            "training.groups_per_step=2",
            "training.rollouts_per_group=4",
            "training.validation_rollouts=0",
            "rollout.max_response_tokens=4",
            "optimizer.learning_rate=1e-3",
        )
        config = load_run_config("graded", plugins, overrides=(*settings, *overrides))
        assembly = assemble(config, plugins)
        summary = asyncio.run(launch.train(assembly, tmp_path / folder, resume=False, progress=Progress()))
        assert summary["status"] == "completed"
        assert verify(tmp_path / folder).problems == []
        return [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]

    return run


def each_in_each_mode() -> list[tuple[str, str, str]]:
    """Returns runs in which each estimator and each loss meets each mode.

    An estimator and a loss meet only in the samples; the tests of gradients combine each with each.
    """
    estimators, losses = list(ESTIMATORS), list(LOSSES)
    return [
        (estimators[place % len(estimators)], losses[(place + 3 * shift) % len(losses)], mode)
        for shift, mode in enumerate(MODES)
        for place in range(max(len(estimators), len(losses)))
    ]


def test_each_estimator_and_each_loss_meets_each_mode() -> None:
    runs = each_in_each_mode()
    assert {(estimator, mode) for estimator, _, mode in runs} == set(product(ESTIMATORS, MODES))
    assert {(loss, mode) for _, loss, mode in runs} == set(product(LOSSES, MODES))
    assert len(set(runs)) == len(runs) < 24


EVERY_RUN = list(product(ESTIMATORS, LOSSES, MODES))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "loss", "mode"),
    [run if run in each_in_each_mode() else pytest.param(*run, marks=pytest.mark.by_hand) for run in EVERY_RUN],
)
def test_whole_runs(play: Callable[..., list[dict[str, float]]], estimator: str, loss: str, mode: str) -> None:
    options = [f"algorithm.loss_options.{key}={value}" for key, value in LOSS_OPTIONS.get(loss, {}).items()]
    first, second = play(f"algorithm.name={estimator}", f"algorithm.loss={loss}", *options, *MODES[mode])
    assert first["grad_norm"] > 0
    assert (first["staleness_max"], second["staleness_max"]) == (0, int(mode == "asynchronous"))
    for row in (first, second):
        assert row["off_policy_effective_share"] <= 1
        assert ("clipped_share" in row) == (loss not in ("reinforce", "cross_entropy", "importance_sampling"))
    assert first["off_policy_log_ratio"] < 1e-4
    assert (second["off_policy_log_ratio"] > 1e-4) == (mode == "asynchronous")


CORRECTIONS = classes(providers.CorrectionProvider)
PROXIMAL_POLICIES = ("forward", "interpolated")


def corrections_in_pairs() -> list[tuple[str, str, str]]:
    """Returns runs in which each two values of correction, proximal policy and mode meet."""
    return [
        (correction, proximal_policy, list(MODES)[(row + column) % 2])
        for row, correction in enumerate(CORRECTIONS)
        for column, proximal_policy in enumerate(PROXIMAL_POLICIES)
    ]


def test_each_two_settings_of_a_correction_meet() -> None:
    settings = (CORRECTIONS, PROXIMAL_POLICIES, MODES)
    for one, other in combinations(range(3), 2):
        met = {(run[one], run[other]) for run in corrections_in_pairs()}
        assert met == set(product(settings[one], settings[other]))


EVERY_CORRECTION = list(product(CORRECTIONS, PROXIMAL_POLICIES, MODES))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("correction", "proximal_policy", "mode"),
    [
        run if run in corrections_in_pairs() else pytest.param(*run, marks=pytest.mark.by_hand)
        for run in EVERY_CORRECTION
    ],
)
def test_whole_runs_with_corrections(
    play: Callable[..., list[dict[str, float]]], correction: str, proximal_policy: str, mode: str
) -> None:
    first, _ = play(
        "algorithm.loss=ppo_clip",
        f"algorithm.proximal_policy={proximal_policy}",
        f"algorithm.corrections=['{correction}']",
        *MODES[mode],
    )
    assert first["grad_norm"] > 0, "the first step is on policy, and nothing of it is masked"


@pytest.mark.slow
def test_a_loss_and_a_correction_of_somebody_else(play: Callable[..., list[dict[str, float]]]) -> None:
    mine = play("algorithm.loss=reinforce", folder="mine")
    theirs = play(
        "algorithm.loss=doubled",
        "algorithm.proximal_policy=interpolated",
        "algorithm.corrections=['halved']",
        folder="theirs",
    )
    for own, other in zip(mine, theirs, strict=True):
        assert other["grad_norm"] == pytest.approx(own["grad_norm"], rel=1e-6)
        assert other["correction_weight_mean"] == 0.5
        assert other["clipped_share/positive"] == 1
        assert other["clipped_share/negative"] == 0
        assert "clipped_share" not in own


@pytest.mark.slow
def test_local_needs_no_pass_of_its_own_for_the_proximal_policy(
    play: Callable[..., list[dict[str, float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def compute(*_: Any) -> Any:
        raise AssertionError("one forward pass is enough")

    monkeypatch.setattr(LocalBackend, "compute_logprobs", compute)
    corrected = ("algorithm.proximal_policy=forward", "algorithm.corrections=['token_tis']")
    for row in play("algorithm.loss=ppo_clip", *corrected):
        assert row["correction_weight_mean"] == pytest.approx(1, abs=1e-4)
        assert row["clipped_share"] == 0
