"""Settings that verl gets although the run file does not name them, in verl's own configuration classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rllm_verl import verl_api
from rllm_verl.cluster import worker_environment
from rllm_verl.config import VerlConfig
from rllm_verl.entropy import recomputed_entropy
from rllm_verl.losses import NATIVE, VerlLoss
from rllm_verl.settings import verl_config
from torch.profiler import ProfilerActivity, profile
from verl.utils.torch_functional import entropy_from_logits, entropy_from_logits_with_chunking
from verl_runs import run_config

from rllm_core.plugins import PluginManager
from rllm_core.providers import PolicyLossProvider

GPU = ("verl.device=cuda", "verl.dtype=bfloat16", "verl.attention=flash_attention_2")
MEGATRON = (*GPU, "verl.strategy=megatron")
PLUGINS = PluginManager.from_environment()


def composed(model: Path, *overrides: str) -> Any:
    """Section ``actor_rollout_ref`` of verl's configuration."""
    config = run_config(model, *overrides)
    return verl_config(config, VerlLoss(config, PLUGINS)).actor_rollout_ref


def as_verl_reads(section: Any) -> Any:
    return verl_api.use("omega_conf_to_dataclass")(section)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_gradients_are_never_kept_whole_and_entropy_comes_in_chunks(model: Path, strategy: str) -> None:
    sections = composed(model, *GPU, f"verl.strategy={strategy}")
    for section in (sections.actor, sections.ref):
        engine = as_verl_reads(section.fsdp_config)
        assert engine.strategy == strategy
        assert engine.use_no_sync_for_gradient_accumulation is False
    engine = as_verl_reads(sections.actor).engine
    assert engine.entropy_from_logits_with_chunking
    assert not engine.entropy_checkpointing  # `recomputed_entropy` does it, a chunk at a time


# --------------------------------------------------------------------------------------------------------------------
# Megatron


def test_megatron_gets_the_settings_of_the_run_file(model: Path) -> None:
    settings = ("optimizer.beta1=0.8", "optimizer.beta2=0.7", "optimizer.epsilon=1e-5", "optimizer.weight_decay=0.25")
    sections = composed(model, *MEGATRON, "verl.gradient_checkpointing=true", *settings)
    actor, reference = as_verl_reads(sections.actor), sections.ref
    assert actor.engine.dtype == reference.megatron.dtype == "bfloat16"
    recomputes = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for transformer in (actor.engine.override_transformer_config, reference.megatron.override_transformer_config):
        assert recomputes.items() <= dict(transformer).items()
    assert actor.engine.entropy_from_logits_with_chunking
    # verl passes these on to Megatron's optimizer, but not its own `betas`.
    assert dict(actor.optim.override_optimizer_config) == {"adam_beta1": 0.8, "adam_beta2": 0.7, "adam_eps": 1e-5}
    assert (actor.optim.weight_decay, actor.optim.lr_decay_style) == (0.25, "constant")


def test_megatron_stores_activations_if_asked_to(model: Path) -> None:
    sections = composed(model, *MEGATRON, "verl.gradient_checkpointing=false")
    assert as_verl_reads(sections.actor).engine.override_transformer_config["recompute_granularity"] is None


def test_megatron_launches_in_order_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    assert worker_environment(VerlConfig(strategy="megatron"))[name] == "1"
    assert name not in worker_environment(VerlConfig())
    monkeypatch.setenv(name, "32")
    assert worker_environment(VerlConfig(strategy="megatron"))[name] == "32"
    assert name not in worker_environment(VerlConfig())


# --------------------------------------------------------------------------------------------------------------------
# Entropy

TOKENS, VOCABULARY, CHUNK = 2048, 4096, 256


def entropy_as_on_a_gpu(logits: torch.Tensor) -> torch.Tensor:
    """verl's entropy without chunks, in the float32 that autocast selects on a GPU."""
    entropy: torch.Tensor = entropy_from_logits(logits.float())
    return entropy


def peak_copies(function: Any, *arguments: Any) -> float:
    """Peak memory of a forward and backward pass, in float32 copies of the logits."""
    leaf = torch.randn(TOKENS, VOCABULARY, dtype=torch.bfloat16, requires_grad=True)
    logits = leaf * 1.0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function(logits, *arguments).mean().backward()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak / (TOKENS * VOCABULARY * 4)


def test_entropy_of_chunks_is_that_of_verl_with_its_gradient() -> None:
    logits = torch.randn(700, 50, requires_grad=True)
    ours = recomputed_entropy(logits, CHUNK)
    [gradient] = torch.autograd.grad(ours.square().sum(), logits)
    theirs = entropy_from_logits(logits)
    [expected] = torch.autograd.grad(theirs.square().sum(), logits)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5)


def test_entropy_takes_little_more_than_the_gradients_of_the_logits() -> None:
    """Two gradients in bfloat16 make up one copy in float32."""
    assert peak_copies(recomputed_entropy, CHUNK) < 1.8
    assert peak_copies(entropy_from_logits_with_chunking, CHUNK) > 2.5
    assert peak_copies(entropy_as_on_a_gpu) > 4


# --------------------------------------------------------------------------------------------------------------------
# Losses under autocast

REGISTERED = sorted(set(PLUGINS.providers(PolicyLossProvider)) - set(NATIVE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", REGISTERED)
def test_a_loss_is_the_same_under_the_autocast_in_which_a_gpu_runs_it(
    model: Path, name: str, dtype: torch.dtype
) -> None:
    """verl calls the loss inside of ``torch.autocast`` unless the run computes in float32."""
    loss = VerlLoss(run_config(model, f"algorithm.loss={name}"), PLUGINS)
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(6, 9, generator=generator) < 0.7
    mask[4] = False  # a filler row
    old = -torch.rand(6, 9, generator=generator)
    current = (old + 0.2 * torch.randn(6, 9, generator=generator)).to(dtype)
    advantages = torch.randn(6, 9, generator=generator)
    info = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": 5, "loss_scale_factor": None}

    class Config:
        global_batch_info = info

    def computed(*, autocast: bool) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = current.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            total, _ = loss._masked_loss(
                old_log_prob=old,
                log_prob=leaf,
                advantages=advantages,
                response_mask=mask,
                loss_agg_mode="token-mean",
                config=Config,
            )
        [gradient] = torch.autograd.grad(total, leaf)
        return total, gradient

    (total, gradient), (expected, expected_gradient) = computed(autocast=True), computed(autocast=False)
    assert torch.isfinite(total)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
