"""Between advantages and gradient: denominators of ratios, correction weights, and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rllm_local.training import LocalTrainer
from transformers import AutoModelForCausalLM

from rllm_core import providers
from rllm_core.algorithms.advantages import RoleEstimators
from rllm_core.algorithms.aggregation import Aggregation
from rllm_core.algorithms.torch_losses import LossInputs, PolicyLoss
from rllm_core.assembly.algorithm import Algorithm, corrections_of, policy_loss
from rllm_core.assembly.components import aggregation_of
from rllm_core.backend import OptimizerStep
from rllm_core.builtin.estimators.outcome import GRPO
from rllm_core.builtin.losses import PPOClip, ReinforceLoss
from rllm_core.config import AlgorithmConfig, KLConfig, OptimizerConfig, RunConfig
from rllm_core.errors import RunError
from rllm_core.plugins import PluginManager
from rllm_core.training.crediting import Crediting
from rllm_core.types import TrainingSample

Build = Callable[..., RunConfig]
PLUGINS = PluginManager.from_environment(no_plugins=True)
CORRECTIONS = sorted(PLUGINS.providers(providers.CorrectionProvider))
LOSSES = sorted(PLUGINS.providers(providers.PolicyLossProvider))
VERSION = 3
COUNTS = OptimizerStep(step=1, total_steps=1, samples=13, sampled_tokens=95, trajectories=13)
# Wide enough to keep some of the samples, and to mask some.
BOUNDS = {
    "geometric_rejection": {"low": 0.8, "high": 1.2},
    "k3_rejection": {"limit": 0.2},
    "icepop": {"low": 0.7, "high": 1.5},
    "sequence_mis": {"low": 0.1, "high": 1.5},
}


@pytest.fixture
def samples(samples: list[TrainingSample]) -> list[TrainingSample]:
    """Returns samples of versions 0 to 3, with log-probabilities close to the model's."""

    def update(number: int, sample: TrainingSample) -> dict[str, Any]:
        assert sample.logprobs is not None
        turns = range(len(sample.turn_spans))
        return {"weight_versions": tuple((number + turn) % 4 for turn in turns), "logprobs": sample.logprobs - 1.2}

    return [sample.model_copy(update=update(number, sample)) for number, sample in enumerate(samples)]


@pytest.fixture
def configured(run_config: Build) -> Build:
    def build(**algorithm: Any) -> RunConfig:
        names = algorithm.get("corrections", ())
        options = {name: BOUNDS[name] for name in names if name in BOUNDS}
        return run_config(algorithm=AlgorithmConfig(correction_options=options, **algorithm))

    return build


@pytest.fixture
def trainer_of(model_folder: Path) -> Callable[..., LocalTrainer]:
    def build(config: RunConfig, **options: Any) -> LocalTrainer:
        defaults: dict[str, Any] = {
            "model": AutoModelForCausalLM.from_pretrained(model_folder).eval(),
            "loss": policy_loss(config, PLUGINS),
            "aggregation": aggregation_of(config),
            "corrections": corrections_of(config, PLUGINS),
            "temperature": 1.0,
            "optimizer_config": OptimizerConfig(learning_rate=1e-3),
            "share_prefixes": True,
            "max_batch_tokens": 4096,
            "version": VERSION,
        }
        return LocalTrainer(**{**defaults, **options})

    return build


def trained(
    trainer: LocalTrainer,
    config: RunConfig,
    passes: Sequence[Sequence[TrainingSample]],
    *,
    forward_is_proximal: bool = True,
    proximal_version: float = VERSION,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Returns the gradient of a step and its diagnostics."""

    async def compute(batch: Sequence[TrainingSample], policy: str) -> Any:
        assert policy == "proximal"
        assert not forward_is_proximal, "one forward pass is enough"
        return trainer.logprobs(batch)

    algorithm = Algorithm(RoleEstimators(GRPO()), corrections_of(config, PLUGINS))
    crediting = Crediting(config, algorithm, compute, forward_is_proximal=forward_is_proximal)
    for samples in passes:
        ready = asyncio.run(crediting.corrected(list(samples), proximal_version=proximal_version))
        trainer.forward_backward(trainer.batch(ready, skip_zero_advantages=True), 0.0)
    gradient = torch.cat([p.grad.flatten() for p in trainer.parameters.values() if p.grad is not None])
    core, local = crediting.diagnostics.flush(), trainer.diagnostics.flush()
    assert not core.keys() & local.keys(), "no metric twice"
    return gradient, {**core, **local}


def assert_close(left: torch.Tensor, right: torch.Tensor) -> None:
    assert float(right.abs().max()) > 0
    assert float((left - right).abs().max()) < 2e-5 * float(right.abs().max())


def approximately(metrics: dict[str, float]) -> Any:
    return pytest.approx(metrics, rel=1e-4, abs=1e-6)


# --------------------------------------------------------------------------------------------------------------------
# Its own forward pass


@pytest.mark.slow
@pytest.mark.parametrize("correction", [None, *CORRECTIONS])
@pytest.mark.parametrize("loss", ["reinforce", "ppo_clip"])
def test_its_own_forward_pass_is_the_proximal_policy(
    trainer_of: Callable[..., LocalTrainer],
    configured: Build,
    samples: list[TrainingSample],
    loss: str,
    correction: str | None,
) -> None:
    """Weights from a separate pass are constants. These must be too, or the gradients would differ."""
    names = () if correction is None else (correction,)
    config = configured(loss=loss, proximal_policy="forward", corrections=names)
    own, own_metrics = trained(trainer_of(config), config, [samples])
    explicit, explicit_metrics = trained(trainer_of(config), config, [samples], forward_is_proximal=False)
    assert_close(own, explicit)
    assert own_metrics == approximately(explicit_metrics)
    plain = configured(loss=loss, proximal_policy="forward")
    uncorrected, _ = trained(trainer_of(plain), plain, [samples])
    is_same = bool((own - uncorrected).abs().max() < 1e-4 * uncorrected.abs().max())
    assert is_same == (correction is None)
    if correction is not None:
        assert own_metrics["correction_weight_mean"] != 1
    if correction in BOUNDS:
        assert 0 < own_metrics["masked_share"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", ["sequence_tis", "geometric_rejection"])
def test_layout_cuts_and_order_change_nothing(
    trainer_of: Callable[..., LocalTrainer],
    configured: Build,
    samples: list[TrainingSample],
    loss: str,
    correction: str,
) -> None:
    config = configured(
        loss=loss,
        proximal_policy="interpolated",
        corrections=(correction,),
        aggregation="sequence_mean_token_mean",
    )
    whole, metrics = trained(trainer_of(config), config, [samples])
    variants = [
        (trainer_of(config, share_prefixes=False), [samples]),
        (trainer_of(config, max_batch_tokens=40), [samples]),
        (trainer_of(config), [samples[9:], samples[4:9], samples[:4]]),
        (trainer_of(config, share_prefixes=False, max_batch_tokens=1), [samples[::-1]]),
    ]
    for trainer, passes in variants:
        gradient, same_metrics = trained(trainer, config, passes)
        assert_close(gradient, whole)
        assert same_metrics == approximately(metrics)


def test_a_sample_that_nobody_knows_the_origin_of_is_on_policy_in_any_company(
    trainer_of: Callable[..., LocalTrainer], configured: Build, samples: list[TrainingSample]
) -> None:
    config = configured(loss="reinforce", proximal_policy="forward", corrections=("token_tis",))
    mixed = [s.model_copy(update={"logprobs": None}) if number % 2 else s for number, s in enumerate(samples)]
    together, metrics = trained(trainer_of(config), config, [mixed])
    apart, apart_metrics = trained(trainer_of(config), config, [mixed[::2], mixed[1::2]])
    explicit, _ = trained(trainer_of(config), config, [mixed], forward_is_proximal=False)
    assert_close(together, apart)
    assert_close(together, explicit)
    assert metrics == approximately(apart_metrics)
    known, known_metrics = trained(trainer_of(config), config, [mixed[::2]])
    plain = configured(loss="reinforce")
    unknown, _ = trained(trainer_of(plain), plain, [mixed[1::2]])
    assert_close(together, known + unknown)
    assert metrics == approximately(known_metrics)


# --------------------------------------------------------------------------------------------------------------------
# Interpolation


class Seen(PolicyLoss):
    """Records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[LossInputs] = []

    def __call__(self, inputs: LossInputs) -> torch.Tensor:
        self.inputs.append(inputs)
        return -inputs.logprobs * inputs.advantages


def of_version(samples: Sequence[TrainingSample], version: int) -> list[TrainingSample]:
    return [s.model_copy(update={"weight_versions": (version,) * len(s.turn_spans)}) for s in samples]


def test_tokens_of_the_live_version_have_the_ratio_to_what_sampled_them(
    trainer_of: Callable[..., LocalTrainer], configured: Build, samples: list[TrainingSample]
) -> None:
    fresh = of_version(samples, VERSION)
    gradients = []
    for policy in ("rollout", "interpolated"):
        config = configured(loss="ppo_clip", proximal_policy=policy)
        gradients.append(trained(trainer_of(config), config, [fresh])[0])
    assert_close(*gradients)


def test_interpolation_ends_at_the_forward_pass(
    trainer_of: Callable[..., LocalTrainer], configured: Build, samples: list[TrainingSample]
) -> None:
    """For older tokens, the proximal policy is closer to the policy in training."""
    forward = configured(loss="ppo_clip", proximal_policy="forward", corrections=("token_tis",))
    expected, _ = trained(trainer_of(forward), forward, [samples])
    interpolated = configured(loss="ppo_clip", proximal_policy="interpolated", corrections=("token_tis",))
    errors = []
    for age in (0, 1, 4, 10**7):
        gradient, _ = trained(
            trainer_of(interpolated), interpolated, [of_version(samples, 0)], proximal_version=float(age)
        )
        errors.append(float((gradient - expected).abs().max() / expected.abs().max()))
    assert errors[-1] < 2e-5 < min(errors[:-1])


def test_interpolated_logprobs_lie_between(
    trainer_of: Callable[..., LocalTrainer], configured: Build, samples: list[TrainingSample]
) -> None:
    config = configured(proximal_policy="interpolated")
    loss = Seen()
    trainer = trainer_of(config, loss=loss, share_prefixes=False, max_batch_tokens=1)
    trained(trainer, config, [samples])
    for inputs in loss.inputs:
        assert inputs.old_logprobs is not None
        [sample] = [
            s for s in samples if np.array_equal(s.advantages, inputs.advantages.numpy()) and s.logprobs is not None
        ]
        sampled, current = torch.tensor(sample.logprobs), inputs.logprobs.detach()
        low, high = torch.minimum(sampled, current), torch.maximum(sampled, current)
        assert (inputs.old_logprobs >= low - 1e-6).all()
        assert (inputs.old_logprobs <= high + 1e-6).all()
        ages = np.repeat(
            VERSION - np.array(sample.weight_versions), [stop - start for start, stop in sample.turn_spans]
        )
        fraction = torch.from_numpy(ages / (ages + 1.0)).float()
        assert torch.allclose(inputs.old_logprobs, sampled + fraction * (current - sampled), atol=1e-5)


# --------------------------------------------------------------------------------------------------------------------
# Metrics


def test_clipped_tokens_are_counted_by_sign_and_age(
    trainer_of: Callable[..., LocalTrainer], configured: Build, samples: list[TrainingSample]
) -> None:
    config = configured(loss="ppo_clip")
    trainer = trainer_of(config)
    current = trainer.logprobs(samples)
    _, metrics = trained(trainer, config, [samples])
    log_ratios = np.concatenate([mine - s.logprobs for mine, s in zip(current, samples, strict=True)])
    advantages = np.concatenate([s.advantages for s in samples])
    ages = np.concatenate(
        [
            np.repeat(VERSION - np.array(s.weight_versions), [stop - start for start, stop in s.turn_spans])
            for s in samples
        ]
    )
    ratios = np.exp(log_ratios.astype(np.float64))
    clipped = np.where(advantages > 0, ratios > 1.2, ratios < 0.8)
    assert (advantages != 0).all()
    expected = {
        "clipped_share": clipped.mean(),
        "clipped_share/positive": clipped[advantages > 0].mean(),
        "clipped_share/negative": clipped[advantages < 0].mean(),
        "clipped_share/age_0": clipped[ages == 0].mean(),
        "clipped_share/age_1": clipped[ages == 1].mean(),
        "clipped_share/age_2_3": clipped[ages >= 2].mean(),
    }
    assert 0 < expected["clipped_share"] < 1
    assert {name: value for name, value in metrics.items() if name.startswith("clipped")} == approximately(expected)
    assert metrics["off_policy_log_ratio"] == pytest.approx(np.abs(log_ratios).mean(), rel=1e-5)
    assert metrics["off_policy_effective_share"] == pytest.approx(ratios.sum() ** 2 / len(ratios) / (ratios**2).sum())


def test_what_is_masked_cannot_be_clipped(
    trainer_of: Callable[..., LocalTrainer], configured: Build, samples: list[TrainingSample]
) -> None:
    config = configured(loss="ppo_clip", proximal_policy="interpolated", corrections=("icepop",))
    loss = Seen()
    trained(trainer_of(config, loss=loss), config, [samples])
    _, metrics = trained(trainer_of(config), config, [samples])
    seen = torch.cat([inputs.advantages for inputs in loss.inputs])
    assert metrics["masked_share"] == pytest.approx(float((seen == 0).float().mean()))
    kept = [(inputs, inputs.advantages != 0) for inputs in loss.inputs]
    ratios = torch.cat([inputs.log_ratios().detach().exp()[chosen] for inputs, chosen in kept])
    advantages = torch.cat([inputs.advantages[chosen] for inputs, chosen in kept])
    clipped = torch.where(advantages > 0, ratios > 1.2, ratios < 0.8)
    assert metrics["clipped_share"] == pytest.approx(float(clipped.float().mean()))


# --------------------------------------------------------------------------------------------------------------------
# Divergence from the reference


def with_reference(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    rng = np.random.default_rng(1)
    return [s.model_copy(update={"reference_logprobs": rng.uniform(-6, -4, s.sampled_tokens)}) for s in samples]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
def test_divergence_and_entropy_are_exact_however_they_are_cut(
    trainer_of: Callable[..., LocalTrainer],
    configured: Build,
    samples: list[TrainingSample],
    estimator: Any,
    aggregation: str,
) -> None:
    config = configured(aggregation=aggregation)
    kl = KLConfig(coefficient=0.3, estimator=estimator)
    given = with_reference([s.model_copy(update={"advantages": np.zeros_like(s.advantages)}) for s in samples])
    found, measured = [], []
    for share, most, passes in ((True, 4096, [given]), (False, 30, [given[9:], given[:9]])):
        trainer = trainer_of(config, kl=kl, share_prefixes=share, max_batch_tokens=most)
        for part in passes:
            trainer.forward_backward(trainer.batch(part, skip_zero_advantages=False), 0.01)
        gradient = torch.cat([p.grad.flatten() for p in trainer.parameters.values() if p.grad is not None])
        result = trainer.step(COUNTS)
        found.append((gradient, result.metrics))
        measured.append(result.tokens)
    (whole, metrics), (cut, cut_metrics) = found
    assert_close(cut, whole)
    assert metrics == approximately(cut_metrics)

    model = trainer_of(config).model
    weight = Aggregation(aggregation).token_weight
    total, divergence = torch.zeros(()), 0.0
    for sample in given:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
        mask = torch.from_numpy(sample.loss_mask[1:])
        mine = logprobs.gather(1, ids[0, 1:, None]).squeeze(1)[mask]
        entropies = -(logprobs.exp() * logprobs).sum(-1)[mask]
        x = torch.tensor(sample.reference_logprobs) - mine
        estimates = {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[estimator]
        divergence += float(estimates.detach().sum())
        for tokens in measured:
            kept = tokens[sample.sample_id]
            np.testing.assert_allclose(kept.logprobs, mine.detach().numpy(), atol=1e-5)
            np.testing.assert_allclose(kept.entropies, entropies.detach().numpy(), atol=1e-5)
        total = total + weight(sample.sampled_tokens) * (0.3 * estimates - 0.01 * entropies).sum()
    gradients = torch.autograd.grad(total, [p for p in model.parameters() if p.requires_grad])
    count = Aggregation(aggregation).denominator(COUNTS)
    norm = torch.cat([g.flatten() for g in gradients]).norm() / count
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["kl_reference"] == pytest.approx(divergence / 95, rel=1e-4)


def test_a_divergence_of_zero_is_a_number(
    trainer_of: Callable[..., LocalTrainer], configured: Build, samples: list[TrainingSample]
) -> None:
    trainer = trainer_of(configured(), kl=KLConfig(coefficient=0.3), share_prefixes=False, max_batch_tokens=1)
    given = [
        s.model_copy(update={"reference_logprobs": mine})
        for s, mine in zip(samples, trainer.logprobs(samples), strict=True)
    ]
    trainer.forward_backward(trainer.batch(given, skip_zero_advantages=False), 0.0)
    assert trainer.step(COUNTS).metrics["kl_reference"] == pytest.approx(0, abs=1e-9)


def test_a_divergence_from_nothing_is_an_error(
    trainer_of: Callable[..., LocalTrainer], configured: Build, samples: list[TrainingSample]
) -> None:
    trainer = trainer_of(configured(), kl=KLConfig(coefficient=0.3))
    partly = [*with_reference(samples[:5]), *samples[5:]]
    with pytest.raises(RunError, match=r"algorithm\.kl needs log-probabilities of the reference model"):
        trainer.batch(partly, skip_zero_advantages=False)


# --------------------------------------------------------------------------------------------------------------------
# Requirements of losses


def test_where_ratios_begin_has_to_be_known(
    trainer_of: Callable[..., LocalTrainer], configured: Build, samples: list[TrainingSample]
) -> None:
    unknown = samples[0].model_copy(update={"logprobs": None})
    turns = len(unknown.turn_spans)
    known = [
        {"proximal_logprobs": np.full(unknown.sampled_tokens, -5.0, np.float32)},
        {"proximal_fractions": np.ones(turns, np.float32)},
    ]
    for loss in (PPOClip(), ReinforceLoss()):
        trainer = trainer_of(configured(), loss=loss)
        for update in known:
            trainer.forward_backward(
                trainer.batch([unknown.model_copy(update=update)], skip_zero_advantages=False), 0.0
            )
        assert len(trainer.logprobs([unknown])[0]) == unknown.sampled_tokens
    halfway = unknown.model_copy(update={"proximal_fractions": np.full(turns, 0.5, np.float32)})
    trainer = trainer_of(configured(), loss=PPOClip())
    for sample in (unknown, halfway):
        with pytest.raises(RunError, match="the engine returned none for some samples"):
            trainer.batch([sample], skip_zero_advantages=False)
