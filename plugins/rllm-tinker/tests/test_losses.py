"""The server's loss has the same gradient as the core's own loss, for every aggregation and service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from rllm_tinker.config import TinkerConfig
from rllm_tinker.losses import LOSSES, OPTIONS, ServerLoss

from rllm_core.algorithms.aggregation import AGGREGATIONS
from rllm_core.algorithms.torch_losses import LossInputs
from rllm_core.assembly.algorithm import policy_loss
from rllm_core.assembly.components import aggregation_of
from rllm_core.backend import OptimizerStep
from rllm_core.builtin.losses import CISPOOptions, PPOClipOptions
from rllm_core.config import AlgorithmConfig, RunConfig
from rllm_core.errors import ConfigError, RunError
from rllm_core.plugins import PluginManager
from rllm_core.types import TrainingSample

SERVICES = ("hosted", "skyrl")


def run(loss: str, aggregation: str, **options: float) -> RunConfig:
    algorithm = AlgorithmConfig(loss=loss, loss_options=options, aggregation=aggregation, aggregation_norm_tokens=7)
    return RunConfig(workflow="sort", backend="tinker", algorithm=algorithm, plugins={"tinker": TinkerConfig()})


@pytest.fixture(scope="module")
def samples() -> list[TrainingSample]:
    """Samples of one or two turns and many lengths, with ratios beyond every bound."""
    rng = np.random.default_rng(0)
    built = []
    for index, turns in enumerate(([3], [1, 5], [8], [2, 2])):
        spans, end = [], 4
        for length in turns:
            spans.append((end, end + length))
            end += length + 2
        count = sum(turns)
        built.append(
            TrainingSample(
                group_id=0,
                rollout_id=str(index),
                token_ids=rng.integers(0, 50, end),
                turn_spans=tuple(spans),
                logprobs=rng.uniform(-3, -1, count),
                advantages=rng.normal(size=count),
                weight_versions=(0,) * len(spans),
            )
        )
    return built


def on_server(loss: ServerLoss, sent: dict[str, Any], logprobs: torch.Tensor) -> torch.Tensor:
    """Per-token losses, by the formulas of the servers' documentation."""
    if loss.server_name == "cross_entropy":
        return -sent["weights"] * logprobs
    ratio = torch.exp(logprobs - sent["logprobs"])
    if loss.server_name == "importance_sampling":
        return -ratio * sent["advantages"]
    clipped = ratio.clamp(loss.settings["clip_low_threshold"], loss.settings["clip_high_threshold"])
    if loss.server_name == "cispo":
        return -clipped.detach() * sent["advantages"] * logprobs
    assert loss.server_name == "ppo"
    return -torch.minimum(ratio * sent["advantages"], clipped * sent["advantages"])


def server_gradient(loss: ServerLoss, passes: Sequence[Sequence[TrainingSample]]) -> list[Any]:
    policies, total, sequences = [], torch.zeros(()), 0
    for part in passes:
        for sample, factor in zip(part, loss.factors(part), strict=True):
            policy = policy_of(sample)
            sent = {name: torch.tensor(array) for name, array in loss.inputs(sample, factor).items()}
            losses = on_server(loss, sent, policy)
            total = total + (losses.sum() / sent["weights"].sum() if loss.service == "skyrl" else losses.sum())
            policies.append(policy)
            sequences += 1
    return list(torch.autograd.grad(total / sequences if loss.service == "skyrl" else total, policies))


def policy_of(sample: TrainingSample) -> torch.Tensor:
    moved = np.random.default_rng(int(sample.rollout_id)).normal(scale=0.5, size=sample.sampled_tokens)
    assert sample.logprobs is not None
    return torch.tensor(sample.logprobs + moved, dtype=torch.float32, requires_grad=True)


def core_gradient(config: RunConfig, samples: Sequence[TrainingSample]) -> list[Any]:
    plugins = PluginManager.from_environment(no_plugins=True)
    loss, aggregation = policy_loss(config, plugins), aggregation_of(config)
    step = OptimizerStep(
        step=1,
        total_steps=1,
        samples=len(samples),
        sampled_tokens=sum(sample.sampled_tokens for sample in samples),
        trajectories=len(samples),
    )
    policies, total = [], torch.zeros(())
    for sample in samples:
        policy, tokens = policy_of(sample), sample.sampled_tokens
        inputs = LossInputs(
            logprobs=policy,
            old_logprobs=torch.from_numpy(np.array(sample.logprobs)),
            advantages=torch.from_numpy(np.array(sample.advantages)),
            sequence_of_token=torch.zeros(tokens, dtype=torch.int64),
            sequences=1,
        )
        total = total + loss(inputs).sum() * aggregation.token_weight(tokens)
        policies.append(policy)
    return list(torch.autograd.grad(total / aggregation.denominator(step), policies))


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_gradient_on_the_server_is_the_cores(name: str, aggregation: str, service: Any, samples) -> None:
    config = run(name, aggregation)
    loss = ServerLoss.of(config, service)
    expected = core_gradient(config, samples)
    assert max(float(gradient.abs().max()) for gradient in expected) > 1e-3
    passes = [[samples]] + ([[samples[:1], samples[1:]]] if loss.streams else [])
    for cut in passes:
        for mine, theirs in zip(server_gradient(loss, cut), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_reported_loss_is_the_cores(name: str, samples) -> None:
    config = run(name, "token_mean")
    loss = ServerLoss.of(config, "skyrl")
    plugins = PluginManager.from_environment(no_plugins=True)
    for sample in samples:
        policy = policy_of(sample).detach()
        inputs = LossInputs(
            logprobs=policy,
            old_logprobs=torch.from_numpy(np.array(sample.logprobs)),
            advantages=torch.from_numpy(np.array(sample.advantages)),
            sequence_of_token=torch.zeros(len(policy), dtype=torch.int64),
            sequences=1,
        )
        expected = policy_loss(config, plugins)(inputs).numpy()
        np.testing.assert_allclose(loss.token_losses(sample, policy.numpy()), expected, rtol=1e-5, atol=1e-6)


def test_only_a_mean_over_sequences_is_known_before_the_step_is_whole() -> None:
    streaming = {
        (service, aggregation)
        for service in SERVICES
        for aggregation in AGGREGATIONS
        if ServerLoss.of(run("reinforce", aggregation), service).streams
    }
    assert streaming == {("skyrl", aggregation) for aggregation in AGGREGATIONS if aggregation != "token_mean"}


def test_options_are_those_of_the_core() -> None:
    for name, model in (("ppo_clip", PPOClipOptions), ("cispo", CISPOOptions)):
        assert OPTIONS[name].model_json_schema()["properties"] == model.model_json_schema()["properties"]
    loss = ServerLoss.of(run("ppo_clip", "token_mean", clip_high=0.28), "hosted")
    assert loss.settings == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
    with pytest.raises(ConfigError, match="clip_hihg"):
        ServerLoss.of(run("ppo_clip", "token_mean", clip_hihg=0.28), "hosted")


def test_a_ratio_needs_to_know_what_sampled(samples) -> None:
    unknown = samples[0].model_copy(update={"logprobs": None})
    assert ServerLoss.of(run("reinforce", "token_mean"), "skyrl").inputs(unknown, 1.0)
    with pytest.raises(RunError, match="rollout 0 has none"):
        ServerLoss.of(run("importance_sampling", "token_mean"), "skyrl").inputs(unknown, 1.0)
