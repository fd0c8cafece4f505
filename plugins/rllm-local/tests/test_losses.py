"""Policy losses, compared with hand-computed numbers and with a second implementation of their formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rllm_core.algorithms.corrections import Correction, Corrections
from rllm_core.algorithms.torch_losses import LossInputs, PolicyLoss, clipped_of, kl_estimate
from rllm_core.builtin.losses import (
    CISPO,
    DPPOTV,
    GSPO,
    CrossEntropy,
    DualClip,
    ImportanceSampling,
    PPOClip,
    ReinforceLoss,
)
from rllm_core.builtin.off_policy_corrections import IcePop, Importance, TokenTIS
from rllm_core.errors import ConfigError, RunError


def inputs(current: torch.Tensor, old: torch.Tensor | None, advantages: torch.Tensor) -> LossInputs:
    """One sequence."""
    return LossInputs(current, old, advantages, torch.zeros(len(current), dtype=torch.int64), 1)


ROLLOUT = torch.tensor([-1.1, -0.4, -1.2, -0.1], dtype=torch.float64)
CURRENT = torch.tensor([-1.0, -0.45, -0.9, -0.15], dtype=torch.float64)
ONES = torch.ones(4, dtype=torch.float64)


def ppo(**options: float) -> PPOClip:
    return PPOClip(options, where="algorithm.loss_options")


@pytest.mark.parametrize(
    ("advantage", "options", "expected"),
    [
        (1.0, {}, -1.051907),  # the third ratio, 1.34986, is clipped at 1.2
        (1.0, {"clip_high": 0.28}, -1.071907),
        (-1.0, {}, 1.089372),  # Pessimistic bound: a ratio above the clip counts in full if the advantage is negative.
    ],
)
def test_ppo_clip_means(advantage: float, options: dict[str, float], expected: float) -> None:
    losses = ppo(**options)(inputs(CURRENT, ROLLOUT, advantage * ONES))
    assert losses.mean().item() == pytest.approx(expected, abs=1e-6)


def test_ppo_clip_gradient_stops_at_the_bounds() -> None:
    current = CURRENT.clone().requires_grad_()
    ppo()(inputs(current, ROLLOUT, ONES)).sum().backward()
    ratio = torch.exp(CURRENT - ROLLOUT)
    assert torch.allclose(current.grad, torch.where(ratio > 1.2, 0.0, -ratio))


def test_ppo_clip_stays_finite_for_abandoned_tokens() -> None:
    losses = ppo()(inputs(torch.tensor([0.0]), torch.tensor([-500.0]), torch.tensor([-1.0])))
    assert torch.isfinite(losses).all()


def test_reinforce_is_the_policy_gradient() -> None:
    advantages = torch.tensor([1.0, -2.0, 0.0, 0.5], dtype=torch.float64)
    current = CURRENT.clone().requires_grad_()
    losses = ReinforceLoss()(inputs(current, None, advantages))
    losses.sum().backward()
    assert torch.equal(losses.detach(), -advantages)
    assert torch.equal(current.grad, -advantages)


def test_on_policy_the_losses_have_one_gradient() -> None:
    gradients = []
    for loss in (ReinforceLoss(), ppo()):
        current = ROLLOUT.clone().requires_grad_()
        loss(inputs(current, ROLLOUT, 3 * ONES)).sum().backward()
        gradients.append(current.grad)
    assert torch.equal(*gradients)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.loss_options.clip_low = 1.5"):
        ppo(clip_low=1.5)
    with pytest.raises(ValueError, match="the loss needs log-probabilities"):
        ppo()(inputs(CURRENT, None, ONES))


def test_a_loss_takes_no_options_unless_it_says_so() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm.loss_options.clip_low'"):
        ReinforceLoss({"clip_low": 0.1}, where="algorithm.loss_options")
    with pytest.raises(ConfigError, match=r"did you mean 'algorithm.loss_options.clip_high'"):
        ppo(clip_hihg=0.1)


# --------------------------------------------------------------------------------------------------------------------
# More golden vectors: mu sampled, ROLLOUT is the proximal policy of the rows above


MU = torch.tensor([-1.0, -0.5, -2.0, -0.1], dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "old", "expected"),
    [
        (GSPO(), ROLLOUT, -1.0004),  # s = 1.077884
        (GSPO({"clip_high": 0.5}), ROLLOUT, -1.077884),
        (CISPO({"clip_high": 0.28}), ROLLOUT, 0.706977),
        (CISPO(), MU, 1.079876),
        (DPPOTV(), MU, -(1 + 1.051271 + 0 + 0.951229) / 4),  # probabilities move by 0, 0.031, 0.271 and -0.044
        (ImportanceSampling(), MU, -(1 + 1.051271 + 3.004166 + 0.951229) / 4),
        (DualClip(), MU, -(1 + 1.051271 + 1.2 + 0.951229) / 4),
    ],
)
def test_golden_vectors(loss: PolicyLoss, old: torch.Tensor, expected: float) -> None:
    assert loss(inputs(CURRENT, old, ONES)).mean().item() == pytest.approx(expected, abs=1e-6)


def test_dual_clip_bounds_what_a_bad_token_can_do() -> None:
    """Without it the third token would count 3.004166."""
    assert DualClip()(inputs(CURRENT, MU, -ONES)).tolist() == pytest.approx([1, 1.051271, 3, 0.951229], abs=1e-6)


@pytest.mark.parametrize(
    ("correction", "weights", "expected"),
    [
        (TokenTIS(), [0.904837, 1.105171, 2.0, 1.0], -1.350625),
        (Importance(), [0.904837, 1.105171, 2.225541, 1.0], -1.418288),
        (IcePop({"high": 2.0}), [0.904837, 1.105171, 0.0, 1.0], -0.750625),
    ],
)
def test_decoupled_ppo(correction: Correction, weights: list[float], expected: float) -> None:
    found = Corrections([correction]).weights((ROLLOUT - MU).numpy(), np.zeros(1, np.int64))
    assert found.tolist() == pytest.approx(weights, abs=1e-6)
    losses = ppo()(inputs(CURRENT, ROLLOUT, torch.from_numpy(found)))
    assert losses.mean().item() == pytest.approx(expected, abs=1e-6)


# --------------------------------------------------------------------------------------------------------------------
# The formulas again, with their gradients, in numpy


Array = npt.NDArray[np.float64]
Formula = Callable[[Array, Array, Array, Array], tuple[Array, Array]]
"""Maps logp, log r, A and the sequence of each token to losses and their gradients with respect to logp."""


def reinforce(logp: Array, log_r: Array, a: Array, sequence: Array) -> tuple[Array, Array]:
    return -a, -a


def cross_entropy(logp: Array, log_r: Array, a: Array, sequence: Array) -> tuple[Array, Array]:
    return -logp * a, -a


def importance_sampling(logp: Array, log_r: Array, a: Array, sequence: Array) -> tuple[Array, Array]:
    clamped = np.clip(log_r, -20, 20)
    return -np.exp(clamped) * a, -np.exp(clamped) * a * (clamped == log_r)


def clipping(low: float, high: float, dual: float = np.inf) -> Formula:
    def formula(logp: Array, log_r: Array, a: Array, sequence: Array) -> tuple[Array, Array]:
        r = np.exp(np.clip(log_r, -20, 20))
        reached = np.where(a > 0, np.minimum(r, 1 + high), np.minimum(np.maximum(r, 1 - low), dual))
        return -reached * a, np.where((reached == r) & (abs(log_r) < 20), -r * a, 0.0)

    return formula


def gspo(logp: Array, log_r: Array, a: Array, sequence: Array) -> tuple[Array, Array]:
    s = np.array([np.exp(np.clip(log_r, -20, 20)[sequence == number].mean()) for number in sequence])
    reached = np.where(a > 0, np.minimum(s, 1.2), np.maximum(s, 0.7))
    return -reached * a, np.where(reached == s, -s * a, 0.0)


def cispo(logp: Array, log_r: Array, a: Array, sequence: Array) -> tuple[Array, Array]:
    weight = np.clip(np.exp(np.clip(log_r, -20, 20)), 0.3, 5.0)
    return -weight * a * logp, -weight * a


def dppo_tv(logp: Array, log_r: Array, a: Array, sequence: Array) -> tuple[Array, Array]:
    rise = np.exp(logp) - np.exp(logp - log_r)
    kept = np.where(a > 0, rise <= 0.2, rise >= -0.1)
    losses, gradient = importance_sampling(logp, log_r, a, sequence)
    return losses * kept, gradient * kept


FORMULAS: list[tuple[PolicyLoss, Formula]] = [
    (ReinforceLoss(), reinforce),
    (CrossEntropy(), cross_entropy),
    (ImportanceSampling(), importance_sampling),
    (PPOClip(), clipping(0.2, 0.2)),
    (PPOClip({"clip_low": 0.1, "clip_high": 0.28}), clipping(0.1, 0.28)),
    (DualClip({"dual_clip": 2.0}), clipping(0.2, 0.2, dual=2.0)),
    (GSPO({"clip_low": 0.3, "clip_high": 0.2}), gspo),
    (CISPO({"clip_low": 0.7}), cispo),
    (DPPOTV({"limit_low": 0.1}), dppo_tv),
]
each_formula = pytest.mark.parametrize(("loss", "formula"), FORMULAS, ids=lambda value: getattr(value, "label", None))
TOKENS = st.lists(
    st.tuples(
        st.floats(-12, 0),
        st.floats(-1, 1) | st.floats(-30, 30),
        st.floats(-3, -0.01) | st.floats(0.01, 3) | st.just(0.0),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
)


def columns(tokens: list[Any]) -> tuple[Array, Array, Array, Array]:
    """Returns four arrays of token values; sequences are numbered in order of appearance."""
    logp, log_r, a, names = (np.array(column) for column in zip(*tokens, strict=True))
    assume((abs(abs(log_r) - 20) > 1e-6).all())
    logp, log_r, a = (array.astype(np.float64) for array in (logp, log_r, a))
    return logp, logp - (logp - log_r), a, np.unique(names, return_inverse=True)[1]


def tensors(logp: Array, log_r: Array, a: Array, sequence: Array) -> tuple[torch.Tensor, LossInputs]:
    current = torch.from_numpy(logp).requires_grad_()
    old = torch.from_numpy(logp - log_r)
    count = int(sequence.max()) + 1
    return current, LossInputs(current, old, torch.from_numpy(a), torch.from_numpy(sequence), count)


@each_formula
@settings(max_examples=50, deadline=None)
@given(tokens=TOKENS)
def test_autograd_is_the_gradient_of_the_formula(loss: PolicyLoss, formula: Formula, tokens: list[Any]) -> None:
    logp, log_r, a, sequence = columns(tokens)
    current, given_inputs = tensors(logp, log_r, a, sequence)
    losses = loss(given_inputs)
    losses.sum().backward()
    expected, gradient = formula(logp, log_r, a, sequence)
    np.testing.assert_allclose(losses.detach().numpy(), expected, rtol=1e-9, atol=1e-12)
    assert current.grad is not None
    np.testing.assert_allclose(current.grad.numpy(), gradient, rtol=1e-9, atol=1e-12)


@each_formula
@settings(max_examples=50, deadline=None)
@given(tokens=TOKENS)
def test_what_is_clipped_is_what_the_ratio_no_longer_moves(
    loss: PolicyLoss, formula: Formula, tokens: list[Any]
) -> None:
    logp, log_r, a, sequence = columns(tokens)
    assume((abs(log_r) < 20).all())
    _, given_inputs = tensors(logp, log_r, a, sequence)
    clipped = clipped_of(loss, given_inputs)
    if clipped is None:
        assert isinstance(loss, ReinforceLoss | CrossEntropy | ImportanceSampling)
        return
    ratios = {GSPO: gspo_ratios}.get(type(loss), lambda log_r, sequence: np.exp(log_r))(log_r, sequence)
    _, gradient = formula(logp, log_r, a, sequence)
    full = np.isclose(gradient, -ratios * a, rtol=1e-9, atol=0)
    assert (clipped.numpy() == ~full)[a != 0].all()


def gspo_ratios(log_r: Array, sequence: Array) -> Array:
    return np.array([np.exp(log_r[sequence == number].mean()) for number in sequence])


@each_formula
@settings(max_examples=50, deadline=None)
@given(tokens=TOKENS, scale=st.floats(0.1, 10))
def test_losses_are_linear_in_the_scale_of_advantages(
    loss: PolicyLoss, formula: Formula, tokens: list[Any], scale: float
) -> None:
    """Corrections can therefore multiply advantages instead of losses."""
    logp, log_r, a, sequence = columns(tokens)
    _, once = tensors(logp, log_r, a, sequence)
    _, scaled = tensors(logp, log_r, scale * a, sequence)
    assert torch.allclose(loss(scaled), scale * loss(once), rtol=1e-9, atol=1e-12)


@each_formula
@settings(max_examples=50, deadline=None)
@given(tokens=TOKENS)
def test_single_precision_is_finite(loss: PolicyLoss, formula: Formula, tokens: list[Any]) -> None:
    logp, log_r, a, sequence = columns(tokens)
    current = torch.tensor(logp, dtype=torch.float32, requires_grad=True)
    old = torch.tensor(logp - log_r, dtype=torch.float32)
    advantages = torch.tensor(a, dtype=torch.float32)
    losses = loss(LossInputs(current, old, advantages, torch.from_numpy(sequence), int(sequence.max()) + 1))
    losses.sum().backward()
    assert losses.dtype == torch.float32
    assert current.grad is not None
    assert torch.isfinite(losses).all()
    assert torch.isfinite(current.grad).all()


# --------------------------------------------------------------------------------------------------------------------
# Where formulas agree


def losses_and_gradient(loss: PolicyLoss, values: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
    current, given_inputs = tensors(*values)
    losses = loss(given_inputs)
    losses.sum().backward()
    assert current.grad is not None
    return losses.detach().numpy(), current.grad.numpy()


def random_tokens(sequence: list[int], spread: float = 1.0) -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(0)
    count = len(sequence)
    return rng.uniform(-4, 0, count), rng.normal(0, spread, count), rng.normal(size=count), np.array(sequence)


def test_sequences_of_one_token_have_the_ratio_of_their_token() -> None:
    values = random_tokens(list(range(50)))
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    for mine, theirs in zip(losses_and_gradient(GSPO(bounds), values), losses_and_gradient(ppo(), values), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12)


def test_the_tokens_of_gspo_have_the_gradient_of_its_sequences() -> None:
    logp, log_r, _, sequence = random_tokens([0, 0, 0, 1, 1, 2, 3, 3], 0.3)
    advantages = np.array([1.0, -2.0, 0.5, 1.0])
    current, given_inputs = tensors(logp, log_r, advantages[sequence], sequence)
    loss = GSPO({"clip_low": 0.05, "clip_high": 0.05})
    given_inputs.sequence_means(loss(given_inputs)).sum().backward()
    by_tokens = current.grad

    current, given_inputs = tensors(logp, log_r, advantages[sequence], sequence)
    ratios = given_inputs.sequence_means(current - given_inputs.old_logprobs).exp()
    of_sequence = torch.from_numpy(advantages)
    torch.minimum(ratios * of_sequence, ratios.clamp(0.95, 1.05) * of_sequence).neg().sum().backward()
    assert torch.allclose(by_tokens, current.grad, rtol=1e-12)
    assert 0 < int((by_tokens == 0).sum()) < len(by_tokens), "some sequences are clipped and some are not"


def test_bounds_out_of_reach_leave_the_importance_ratio() -> None:
    values = random_tokens([0] * 30)
    expected = losses_and_gradient(ImportanceSampling(), values)
    unbounded = {"clip_low": 1 - 1e-12, "clip_high": 1e9}
    for loss in (
        PPOClip(unbounded),
        DualClip({**unbounded, "dual_clip": 1e9}),
        DPPOTV({"limit_low": 1, "limit_high": 1}),
    ):
        for mine, theirs in zip(losses_and_gradient(loss, values), expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9)
    np.testing.assert_allclose(losses_and_gradient(CISPO({"clip_high": 1e9}), values)[1], expected[1], rtol=1e-9)


@pytest.mark.parametrize("loss", [loss for loss, _ in FORMULAS], ids=lambda loss: loss.label)
def test_on_policy_every_loss_is_the_policy_gradient(loss: PolicyLoss) -> None:
    logp, _, a, sequence = random_tokens([0, 0, 1, 1, 1])
    _, gradient = losses_and_gradient(loss, (logp, np.zeros(5), a, sequence))
    np.testing.assert_allclose(gradient, -a, rtol=1e-12)


# --------------------------------------------------------------------------------------------------------------------
# Third-party losses


class Wrong(ReinforceLoss):
    answer: Any = None

    def clipped(self, inputs: LossInputs) -> Any:
        return self.answer


@pytest.mark.parametrize(
    "answer", [[True] * len(ONES), torch.zeros(len(ONES)), torch.zeros(len(ONES) + 1, dtype=torch.bool)]
)
def test_garbage_from_clipped_names_the_loss(answer: Any) -> None:
    loss = Wrong()
    loss.answer = answer
    with pytest.raises(RunError, match=r"Wrong: clipped\(\) must return one bool per token"):
        clipped_of(loss, inputs(CURRENT, ROLLOUT, ONES))


# --------------------------------------------------------------------------------------------------------------------
# Divergence from the reference


@settings(max_examples=50, deadline=None)
@given(difference=st.floats(-5, 5))
def test_gradients_of_the_divergence(difference: float) -> None:
    """Gradients with respect to logp, with x = log(reference / policy): k1: 1, k2: -x, k3: 1 - e^x."""
    expected = {"k1": 1.0, "k2": -difference, "k3": 1 - np.exp(difference)}
    for estimator, gradient in expected.items():
        logp = torch.tensor([-1.5], dtype=torch.float64, requires_grad=True)
        kl_estimate(logp, logp.detach() + difference, estimator).sum().backward()  # type: ignore[arg-type]
        assert logp.grad is not None
        assert logp.grad.item() == pytest.approx(gradient, abs=1e-9)


@pytest.mark.parametrize(("estimator", "is_gradient"), [("k1", False), ("k2", True), ("k3", False)])
def test_as_a_loss_only_k2_has_the_gradient_of_the_divergence(estimator: str, is_gradient: bool) -> None:
    """Averages the estimate's gradient over all tokens of a distribution instead of a sample."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.randn(7, generator=generator, dtype=torch.float64), -1)
    logp = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    estimates = kl_estimate(logp, reference, estimator)  # type: ignore[arg-type]
    (average,) = torch.autograd.grad((logp.detach().exp() * estimates).sum(), logits)
    assert torch.allclose(average, exact) == is_gradient
    if estimator == "k1":
        assert torch.allclose(average, torch.zeros_like(average), atol=1e-12)
