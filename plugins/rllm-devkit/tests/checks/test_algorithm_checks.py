"""Tests of the public algorithm checks: our components pass, and each kind of noncompliant one fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel, Field

from rllm_core import providers
from rllm_core.algorithms.advantages import AdvantageEstimator
from rllm_core.algorithms.corrections import Correction
from rllm_core.algorithms.options import Configured
from rllm_core.algorithms.torch_losses import PolicyLoss
from rllm_core.assembly.components import piece_class
from rllm_core.builtin.estimators.outcome import GRPO
from rllm_core.builtin.estimators.turns import ReturnToGo
from rllm_core.builtin.estimators.without_rewards import Precomputed
from rllm_core.builtin.losses import PPOClip, ReinforceLoss
from rllm_core.builtin.off_policy_corrections import TokenTIS
from rllm_core.config import Section
from rllm_core.plugins import PluginManager
from rllm_core.plugins.sections import WITH_OPTIONS
from rllm_devkit.checks import CheckResult, check_correction, check_estimator, check_policy_loss, check_task_sampler

PLUGINS = PluginManager.from_environment(no_plugins=True)
CHECK_OF: dict[type[providers.Provider], Callable[..., list[CheckResult]]] = {
    providers.AdvantageEstimatorProvider: check_estimator,
    providers.PolicyLossProvider: check_policy_loss,
    providers.CorrectionProvider: check_correction,
    providers.TaskSamplerProvider: lambda sampler, seed: check_task_sampler(type(sampler)),
}
OURS = [(kind, name) for kind in WITH_OPTIONS for name in PLUGINS.providers(kind)]


def failures(results: list[CheckResult]) -> dict[str, str]:
    return {result.name: result.detail for result in results if result.outcome == "failed"}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), OURS, ids=lambda value: getattr(value, "kind", value))
def test_all_of_ours_pass(kind: type[providers.Provider], name: str) -> None:
    piece = piece_class(PLUGINS, PLUGINS.select(kind, name))()
    results = CHECK_OF[kind](piece, seed=7)
    assert failures(results) == {}
    assert sum(result.outcome == "passed" for result in results) >= 5


@pytest.mark.parametrize(
    ("piece", "check"),
    [
        (GRPO({"std": "sample"}), check_estimator),
        (ReturnToGo({"baseline": "state", "discount": 0.5}), check_estimator),
        (PPOClip({"clip_low": 0.0, "clip_high": 0.0}), check_policy_loss),
        (TokenTIS({"cap": 1.0}), check_correction),
    ],
)
def test_options_are_checked_as_they_are(piece: Any, check: Any) -> None:
    assert failures(check(piece)) == {}


# --------------------------------------------------------------------------------------------------------------------
# Noncompliant components


class Silent(Section):
    """Has an option without a description."""

    secret: int = 3


class Lax(BaseModel):
    """Accepts unknown keys."""

    known: int = Field(default=3, description="Known.")


def noncompliant(base: type[Configured], **members: Any) -> Any:
    return type("Noncompliant", (base,), members)()


def grpo(scale: Callable[..., Any]) -> Callable[..., Any]:
    """Returns GRPO with each group's advantages changed."""
    return lambda self, groups: [scale(group, credit) for group, credit in zip(groups, GRPO()(groups), strict=True)]


class Shares(GRPO):
    """Compares groups with each other."""

    def __call__(self, groups: Any) -> Any:
        mean = np.mean([t.total_reward for group in groups for t in group.trajectories])
        return [[np.full(len(t.steps), t.total_reward - mean) for t in group.trajectories] for group in groups]


class Remembers(GRPO):
    """Keeps a running mean."""

    calls = 0

    def __call__(self, groups: Any) -> Any:
        self.calls += 1
        return [[credit * self.calls for credit in group] for group in super().__call__(groups)]


class Pays(GRPO):
    """Writes a reward into its input."""

    def __call__(self, groups: Any) -> Any:
        groups[0].trajectories[0].reward = 0.5
        return super().__call__(groups)


class TokenByToken(Precomputed):
    per_token = False


@pytest.mark.parametrize(
    ("estimator", "check", "detail"),
    [
        (noncompliant(GRPO, options_model=Silent), "options", "Silent: add Field(description=...) to secret"),
        (noncompliant(GRPO, options_model=Lax), "options", "unknown keys would be ignored"),
        (
            noncompliant(GRPO, __call__=grpo(lambda group, credit: credit[1:])),
            "shapes",
            "Noncompliant returned advantages for",
        ),
        (
            noncompliant(GRPO, __call__=grpo(lambda group, credit: [c[:1] for c in credit])),
            "shapes",
            "returned advantages",
        ),
        (
            noncompliant(GRPO, __call__=grpo(lambda group, credit: [c / 0 for c in credit])),
            "shapes",
            "returned advantages",
        ),
        (TokenByToken(), "shapes", "declare this with per_token = True"),
        (
            noncompliant(
                GRPO, min_group_size=1, __call__=grpo(lambda group, credit: [c / (len(credit) - 1) for c in credit])
            ),
            "edge cases",
            "returned advantages",
        ),
        (noncompliant(GRPO, min_group_size=0), "edge cases", "min_group_size must be >= 1, got 0"),
        (
            noncompliant(GRPO, __call__=grpo(lambda group, credit: [c + i for i, c in enumerate(credit)])),
            "order of trajectories",
            "depend on the order of the trajectories",
        ),
        (Shares(), "order of groups", 'set scope = "batch"'),
        (noncompliant(Remembers, scope="batch"), "order of groups", "depend on the order of the groups"),
        (Remembers(), "no side effects", "returns different advantages"),
        (Pays(), "no side effects", ""),
    ],
)
@pytest.mark.filterwarnings("ignore:.* encountered in .*divide:RuntimeWarning")
def test_estimators_that_break_the_contract(estimator: AdvantageEstimator, check: str, detail: str) -> None:
    found = failures(check_estimator(estimator))
    assert check in found, found
    assert detail in found[check]


def test_a_batch_estimator_may_compare_groups() -> None:
    assert failures(check_estimator(noncompliant(Shares, scope="batch"))) == {}


def weighing(weigh: Callable[..., Any], **members: Any) -> Any:
    return noncompliant(Correction, __call__=lambda self, ratios, starts: weigh(ratios, starts), **members)


def scale_in_place(ratios: Any, starts: Any) -> Any:
    ratios *= 0.5
    return np.exp(ratios)


@pytest.mark.parametrize(
    ("correction", "check", "detail"),
    [
        (weighing(lambda ratios, starts: ratios), "weights", "one finite weight >= 0 per token"),
        (weighing(lambda ratios, starts: np.ones(len(starts))), "weights", "one finite weight >= 0 per token"),
        (weighing(lambda ratios, starts: np.exp(ratios), is_mask=True), "weights", "declares is_mask"),
        (weighing(lambda ratios, starts: np.exp(ratios) / 2), "on policy", "weights must be 1"),
        (
            weighing(lambda ratios, starts: np.exp(ratios - ratios.mean())),
            "sequence by sequence",
            "on how a step is split",
        ),
        (weighing(scale_in_place), "no side effects", "it modifies the arrays"),
        (weighing(lambda ratios, starts: np.exp(ratios), options_model=Silent), "options", "Field(description=...)"),
    ],
)
def test_corrections_that_break_the_contract(correction: Correction, check: str, detail: str) -> None:
    found = failures(check_correction(correction))
    assert check in found, found
    assert detail in found[check]


def losing(lose: Callable[..., Any], base: type[PolicyLoss] = ReinforceLoss, **members: Any) -> Any:
    return noncompliant(base, __call__=lambda self, inputs: lose(inputs), **members)


def forgetful(inputs: Any) -> Any:
    with torch.no_grad():
        inputs.advantages.mul_(1.5)
    return -inputs.logprobs * inputs.advantages


HIDDEN = torch.ones((), dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "check", "detail"),
    [
        (losing(lambda i: (-i.logprobs * i.advantages).mean()), "shapes", "must return one loss per token"),
        (losing(lambda i: (-i.logprobs * i.advantages)[:, None]), "shapes", "must return one loss per token"),
        (losing(lambda i: -i.logprobs.detach() * i.advantages), "shapes", "returned losses without a gradient"),
        (losing(lambda i: -HIDDEN * i.advantages), "shapes", "does not go through inputs.logprobs"),
        (losing(lambda i: -HIDDEN * i.logprobs * i.advantages), "gradient", "does not come from inputs.logprobs"),
        (losing(lambda i: i.logprobs * i.advantages), "gradient", "must raise the probability of tokens"),
        (losing(lambda i: -torch.exp(-i.logprobs) * i.advantages), "edge cases", "not finite"),
        (losing(lambda i: -i.logprobs * (i.advantages + 1)), "edge cases", "with advantage 0 has a non-zero gradient"),
        (losing(lambda i: -i.logprobs * i.advantages.sign()), "scale of advantages", "must scale with the advantages"),
        (
            losing(lambda i: -i.logprobs * i.advantages / len(i.logprobs)),
            "sequence by sequence",
            "on how a step is split",
        ),
        (losing(lambda i: -i.log_ratios() * i.advantages), "old log-probabilities", "unknown"),
        (losing(forgetful), "no side effects", "changed its inputs in place"),
        (
            losing(lambda i: -i.logprobs * i.advantages, clipped=lambda self, inputs: 3),
            "shapes",
            "must return one bool per token",
        ),
    ],
)
def test_losses_that_break_the_contract(loss: PolicyLoss, check: str, detail: str) -> None:
    found = failures(check_policy_loss(loss))
    assert check in found, found
    assert detail in found[check]
