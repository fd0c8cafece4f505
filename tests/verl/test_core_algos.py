"""Our estimators, losses, corrections and aggregations, compared with verl's on random batches.

verl pads sequences to rows ``(batch, tokens)`` with a mask; we concatenate them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rllm_verl import verl_api
from rllm_verl.losses import VerlLoss
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.workers.config import FSDPActorConfig
from verl_runs import run_config

from rllm_core import providers
from rllm_core.algorithms.advantages import Credit
from rllm_core.algorithms.aggregation import Aggregation
from rllm_core.algorithms.corrections import Corrections
from rllm_core.algorithms.kl import kl_estimate
from rllm_core.algorithms.torch_losses import LossInputs
from rllm_core.algorithms.torch_losses import kl_estimate as torch_kl_estimate
from rllm_core.backend import OptimizerStep
from rllm_core.plugins import PluginManager
from rllm_core.types import Step, Trajectory, TrajectoryGroup

SEEDS = range(5)
GROUPS, ROLLOUTS, TOKENS = 5, 6, 12
PLUGINS = PluginManager.from_environment(no_plugins=True)


def ours(kind: type[providers.Provider], name: str, options: Mapping[str, Any] | None = None) -> Any:
    """A component of the core, by its name in a run file."""
    return PLUGINS.load(PLUGINS.select(kind, name))(options)


class Batch:
    """Random sequences of 1 to ``TOKENS`` tokens, in groups, both as rows and concatenated."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(1, TOKENS + 1, GROUPS * ROLLOUTS)
        self.mask = torch.from_numpy((np.arange(TOKENS) < self.lengths[:, None]).astype(np.float64))
        self.index = np.repeat(np.arange(GROUPS), ROLLOUTS)
        self.rewards = rng.choice([0.0, 0.25, 1.0], GROUPS * ROLLOUTS)
        self.penalties = self.mask.numpy() * rng.normal(0, 0.05, (GROUPS * ROLLOUTS, TOKENS))
        self.rollout = -rng.exponential(1.0, (GROUPS * ROLLOUTS, TOKENS))
        self.old = np.minimum(self.rollout + rng.normal(0, 0.3, self.rollout.shape), 0)
        self.current = np.minimum(self.old + rng.normal(0, 0.3, self.rollout.shape), 0)
        self.advantages = rng.normal(0, 1, self.rollout.shape)
        self.starts = np.cumsum([0, *self.lengths[:-1]])

    def flat(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """``(tokens,)`` values of ``(batch, tokens)`` that are not padding."""
        return rows[self.mask.numpy() > 0]

    def token_level_rewards(self) -> torch.Tensor:
        """Rewards in verl's format: the reward at the last token, penalties anywhere."""
        rewards = self.penalties.copy()
        rewards[np.arange(len(self.lengths)), self.lengths - 1] += self.rewards
        return torch.from_numpy(rewards)

    def groups(self) -> list[TrajectoryGroup]:
        """Input in the format of our estimators."""
        trajectories = [
            Trajectory(
                steps=[
                    Step(
                        prompt_ids=[1],
                        completion_ids=np.arange(length),
                        weight_version=0,
                        token_rewards=self.penalties[row, :length],
                    )
                ],
                reward=float(self.rewards[row]),
            )
            for row, length in enumerate(self.lengths)
        ]
        starts = range(0, len(trajectories), ROLLOUTS)
        return [
            TrajectoryGroup(
                group_id=start,
                task_id="t",
                trajectories=trajectories[start : start + ROLLOUTS],
                rollout_ids=["r"] * ROLLOUTS,
                weight_version=0,
            )
            for start in starts
        ]

    def loss_inputs(self, dtype: torch.dtype = torch.float64) -> LossInputs:
        """Input in the format of our losses, with a gradient."""
        sequences = np.repeat(np.arange(len(self.lengths)), self.lengths)
        current, old, advantages = (
            torch.from_numpy(self.flat(rows)).to(dtype) for rows in (self.current, self.old, self.advantages)
        )
        return LossInputs(current.requires_grad_(), old, advantages, torch.from_numpy(sequences), len(self.lengths))


def spread(credits: list[list[Credit]], lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``(tokens,)`` advantages from the result of our estimators."""
    flat = [credit for group in credits for credit in group]
    parts = [np.concatenate(c) if isinstance(c, list) else np.repeat(c, n) for c, n in zip(flat, lengths, strict=True)]
    return np.concatenate(parts)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "options", "theirs", "arguments"),
    [
        ("grpo", {"std": "sample"}, "grpo", {}),
        ("dr_grpo", {}, "grpo", {"norm_adv_by_std_in_grpo": False}),
        ("rloo", {}, "rloo", {}),
        ("reinforce_plus_plus", {}, "reinforce_plus_plus", {"config": AlgoConfig(gamma=1.0)}),
        ("reinforce_plus_plus_baseline", {}, "reinforce_plus_plus_baseline", {}),
    ],
)
def test_advantages(seed: int, name: str, options: Any, theirs: str, arguments: dict[str, Any]) -> None:
    batch = Batch(seed)
    if not theirs.startswith("reinforce_plus_plus"):
        arguments = {"index": batch.index, **arguments}
    elif theirs.endswith("baseline"):
        arguments = {"index": batch.index}
    estimator = core_algos.get_adv_estimator_fn(theirs)
    expected, _ = estimator(token_level_rewards=batch.token_level_rewards(), response_mask=batch.mask, **arguments)
    credits = ours(providers.AdvantageEstimatorProvider, name, options)(batch.groups())
    assert spread(credits, batch.lengths) == pytest.approx(batch.flat(expected.numpy()), abs=1e-6)


LOSSES = [
    ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28}, "vanilla", {"clip_ratio_c": 1e9}),
    ("dual_clip", {"clip_low": 0.2, "clip_high": 0.28}, "vanilla", {"clip_ratio_c": 3.0}),
    ("gspo", {"clip_low": 0.02, "clip_high": 0.03}, "gspo", {}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.28}, "cispo", {}),
]
AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean_token_mean": "seq-mean-token-mean",
    "sequence_mean_token_sum": "seq-mean-token-sum",
    "sequence_mean_token_sum_norm": "seq-mean-token-sum-norm",
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("name", "options", "theirs", "changes"), LOSSES)
def test_losses_and_their_gradients(
    seed: int, aggregation: str, name: str, options: dict[str, float], theirs: str, changes: dict[str, float]
) -> None:
    batch = Batch(seed)
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=options["clip_low"],
        clip_ratio_high=options["clip_high"],
        **{"clip_ratio_c": 3.0, **changes},
    )
    config.global_batch_info["loss_scale_factor"] = TOKENS
    current = torch.from_numpy(batch.current).requires_grad_()
    expected, metrics = core_algos.get_policy_loss_fn(theirs)(
        old_log_prob=torch.from_numpy(batch.old),
        log_prob=current,
        advantages=torch.from_numpy(batch.advantages),
        response_mask=batch.mask,
        loss_agg_mode=AGGREGATIONS[aggregation],
        config=config,
    )
    expected.backward()

    inputs = batch.loss_inputs()
    loss = ours(providers.PolicyLossProvider, name, options)
    aggregate = Aggregation(aggregation, TOKENS)
    weights = np.repeat([aggregate.token_weight(length) for length in batch.lengths.tolist()], batch.lengths)
    tokens = int(batch.lengths.sum())
    step = OptimizerStep(
        step=1, total_steps=1, samples=len(batch.lengths), sampled_tokens=tokens, trajectories=len(batch.lengths)
    )
    total = (loss(inputs) * torch.from_numpy(weights)).sum() / aggregate.denominator(step)
    total.backward()
    assert total.item() == pytest.approx(expected.item(), abs=1e-6)
    assert current.grad is not None
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.numpy() == pytest.approx(batch.flat(current.grad.numpy()), abs=1e-7)
    if name in ("ppo_clip", "gspo"):
        clipped = loss.clipped(inputs)
        assert clipped.double().mean().item() == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_divergences(estimator: Any) -> None:
    batch = Batch(0)
    theirs = core_algos.kl_penalty_forward(torch.from_numpy(batch.current), torch.from_numpy(batch.old), estimator)
    assert kl_estimate(batch.current, batch.old, estimator) == pytest.approx(theirs.numpy(), abs=1e-9)
    mine = torch_kl_estimate(torch.from_numpy(batch.current), torch.from_numpy(batch.old), estimator)
    assert mine.numpy() == pytest.approx(theirs.numpy(), abs=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_divergences_far_from_the_reference_are_ours(
    model: Path, monkeypatch: pytest.MonkeyPatch, estimator: Any
) -> None:
    """In the loss that a worker computes: verl bounds k3, so tokens that have moved far get no gradient."""
    ppo_loss = verl_api.use("ppo_loss")
    names = ppo_loss.__globals__
    monkeypatch.setitem(names, "kl_penalty", names["kl_penalty"])
    VerlLoss(run_config(model, "algorithm.loss=ppo_clip"), PluginManager.from_environment()).register()
    current = torch.tensor([-9.0, -5.0, -1.0, -30.0]).requires_grad_()
    reference = torch.tensor([-1.0, -1.0, -6.0, -2.0])
    found = names["kl_penalty"](logprob=current, ref_logprob=reference, kl_penalty=estimator)
    assert found.detach().numpy() == pytest.approx(kl_estimate(current.detach().numpy(), reference.numpy(), estimator))
    found.sum().backward()
    x = [8.0, 4.0, -5.0]
    gradients = {"k1": [1.0] * 3, "k2": [-each for each in x], "k3": [1 - math.exp(each) for each in x]}
    assert current.grad is not None
    assert current.grad.numpy() == pytest.approx([*gradients[estimator], 0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "options", "level", "threshold"),
    [
        ("token_tis", {"cap": 1.3}, "token", 1.3),
        ("sequence_tis", {"cap": 1.3}, "sequence", 1.3),
        ("icepop", {"low": 0.8, "high": 1.25}, "token", "0.8_1.25"),
    ],
)
def test_weights_of_corrections(seed: int, name: str, options: Any, level: str, threshold: Any) -> None:
    batch = Batch(seed)
    ratios = torch.from_numpy(batch.old - batch.rollout)
    theirs, _ = compute_rollout_correction_weights(ratios, batch.mask, level, threshold)
    corrections = Corrections([ours(providers.CorrectionProvider, name, options)])
    weights = corrections.weights(batch.flat(ratios.numpy()), batch.starts)
    assert weights == pytest.approx(batch.flat(theirs.numpy()), abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "options", "mode", "threshold"),
    [
        # verl bounds k1, the mean of -log rho; we bound rho. Its bounds are therefore the reciprocals of ours.
        ("geometric_rejection", {"low": 0.9, "high": 1.1}, "seq_mean_k1", f"{1 / 1.1}_{1 / 0.9}"),
        ("k3_rejection", {"limit": 0.04}, "seq_mean_k3", 0.04),
    ],
)
def test_masks_of_corrections(seed: int, name: str, options: Any, mode: str, threshold: Any) -> None:
    batch = Batch(seed)
    ratios = torch.from_numpy(batch.old - batch.rollout)
    theirs, _ = compute_rollout_rejection_mask(ratios, batch.mask, mode, threshold)
    corrections = Corrections([ours(providers.CorrectionProvider, name, options)])
    weights = corrections.weights(batch.flat(ratios.numpy()), batch.starts)
    kept = batch.flat(theirs.numpy())
    assert 0 < kept.mean() < 1, "the thresholds must divide this batch"
    assert np.array_equal(weights, kept)


def test_the_version_is_the_one_that_the_lane_is_for() -> None:
    assert metadata.version("verl") == "0.9.1"
