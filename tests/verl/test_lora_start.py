"""A run that starts from adapters that PEFT wrote."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from sessions import greatest, in_peft, opened, rollout_logprobs
from transformers import AutoModelForCausalLM
from verl_runs import run_config

GREATEST_GAP = 1e-5
CLEAR_GAP = 1e-2
KL = ("algorithm.kl.coefficient=0.1",)
FAST = ("optimizer.learning_rate=0.005", "optimizer.warmup_steps=0")
LOSSES = ("algorithm.loss=ppo_clip", "algorithm.proximal_policy=forward")


def test_a_run_starts_from_adapters_of_peft(model: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    targets = ["q_proj", "down_proj"]
    get_peft_model(base, LoraConfig(r=6, lora_alpha=9, target_modules=targets)).save_pretrained(str(tmp_path))
    weights = load_file(tmp_path / "adapter_model.safetensors")
    generator = torch.Generator().manual_seed(0)
    save_file(
        {name: 0.1 * torch.randn(weight.shape, generator=generator) for name, weight in weights.items()},
        tmp_path / "adapter_model.safetensors",
    )
    with opened(run_config(model, f"verl.lora.adapter={tmp_path}", *LOSSES, *KL, *FAST)) as session:
        samples = session.sampled(session.run(session.sample(8)), [1, -1] * 4)
        expected = in_peft(model, tmp_path, samples)
        assert greatest(rollout_logprobs(samples), expected) <= GREATEST_GAP
        assert greatest(session.logprobs(samples), expected) <= GREATEST_GAP
        assert greatest(expected, in_peft(model, None, samples)) > CLEAR_GAP
        session.train(samples)
        assert greatest(session.logprobs(samples), expected) > CLEAR_GAP
        assert greatest(session.logprobs(samples, "reference"), expected) <= GREATEST_GAP
        session.publish()
        samples = session.sampled(session.run(session.sample(8)))
        assert greatest(session.logprobs(samples), rollout_logprobs(samples)) <= GREATEST_GAP
