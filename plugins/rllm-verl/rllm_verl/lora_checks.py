"""Checks of ``[verl.lora]`` that need no devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rllm_core.config import ConfigError, RunConfig
from rllm_verl.config import VerlConfig
from rllm_verl.lora import Sync, adapter_of, base_of, sync_of
from rllm_verl.settings import has_experts, model_description, verl_settings

# Maximum of vLLM's MaxLoRARanks (config/lora.py).
MAX_SERVED_RANK = 512


def check_lora(config: RunConfig) -> list[str]:
    """Checks ``[verl.lora]``.

    Returns:
        One line for each thing that could not be checked.

    Raises:
        ConfigError: If a setting cannot work.
    """
    settings = verl_settings(config)
    adapter = adapter_of(settings)
    if adapter is None:
        return []
    assert settings.lora is not None
    _check_combination(config, settings)
    if adapter.alpha != int(adapter.alpha):
        raise ConfigError(
            f"verl.lora.alpha = {adapter.alpha:g}: verl 0.9.1 takes whole numbers only; set it to "
            f"{round(adapter.alpha) or 1}, and change optimizer.learning_rate instead"
        )
    sync = sync_of(settings)
    if sync == "adapter" and adapter.rank > MAX_SERVED_RANK:
        raise ConfigError(
            f"verl.lora.rank = {adapter.rank}: vLLM serves adapters of rank {MAX_SERVED_RANK} at most; lower it, or "
            "set verl.placement = 'separated', where servers get merged weights"
        )
    notes = [_sync_note(sync)]
    if has_experts(config.model.path) is None:
        notes.append(f"model.path = {config.model.path!r}: whether it has experts, which cannot get adapters")
    if not adapter.target_modules:
        return notes
    known = linear_layers(config)
    if known is None:
        return [*notes, f"verl.lora.target_modules: whether {config.model.path!r} has these layers"]
    unknown = [name for name in adapter.target_modules if name.rpartition(".")[2] not in known]
    if unknown:
        raise ConfigError(
            f"verl.lora.target_modules: the model has no linear layer {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(sorted(known))}"
        )
    return notes


def _sync_note(sync: Sync) -> str:
    if sync == "adapter":
        return (
            "verl.lora: weight syncs send the adapters alone, because verl.placement = 'colocated'; whether the "
            "servers serve them, each sync checks"
        )
    return (
        "verl.lora: weight syncs send merged weights, because verl 0.9.1 does not send adapters to separated servers "
        "(verl#7495); whether the servers serve them, each sync checks"
    )


def _check_combination(config: RunConfig, settings: VerlConfig) -> None:
    assert settings.lora is not None
    if settings.strategy == "megatron":
        raise ConfigError(
            "verl.lora does not work with verl.strategy = 'megatron': set it to 'fsdp2', or remove [verl.lora]"
        )
    described = model_description(config.model.path)
    if "vision_config" in described:
        raise ConfigError(
            f"verl.lora cannot be used with model.path = {config.model.path!r}, a vision model: verl would train "
            "adapters of its vision tower, which vLLM does not serve; remove [verl.lora], or use a text model"
        )
    if has_experts(config.model.path):
        raise ConfigError(
            f"verl.lora cannot be used with model.path = {config.model.path!r}, a mixture of experts: its experts are "
            "no linear layers in transformers 5, so they would get no adapters; remove [verl.lora], or use a dense one"
        )
    if settings.strategy == "fsdp" and settings.placement == "separated" and settings.dtype == "float32":
        raise ConfigError(
            "verl.lora with verl.strategy = 'fsdp', verl.placement = 'separated' and verl.dtype = 'float32' cannot be "
            "combined: verl 0.9.1 rounds merged weights to bfloat16 there; set verl.strategy = 'fsdp2'"
        )
    if settings.strategy == "fsdp" and "parameters" in settings.offload:
        raise ConfigError(
            "verl.lora with verl.strategy = 'fsdp' cannot be combined with 'parameters' in verl.offload: adapters are "
            "gathered from the devices; remove it there, or set verl.strategy = 'fsdp2'"
        )
    base = base_of(settings.lora.adapter) if settings.lora.adapter else None
    if base and Path(base).name != Path(config.model.path).name:  # a cached model has the same name on every machine
        raise ConfigError(
            f"verl.lora.adapter = {settings.lora.adapter!r} has adapters for {base}, and model.path = "
            f"{config.model.path!r}: set model.path to the model that they are for"
        )
    if settings.lora.adapter and config.training.init_from is not None:
        raise ConfigError("verl.lora.adapter and training.init_from both name the adapters to start from; remove one")


def linear_layers(config: RunConfig) -> frozenset[str] | None:
    """Returns the names of the model's linear layers except the head; None if its config.json is missing here."""
    if not model_description(config.model.path):
        return None
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    trusts = verl_settings(config).trust_remote_code
    described = AutoConfig.from_pretrained(config.model.path, trust_remote_code=trusts, local_files_only=True)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(described, trust_remote_code=trusts)  # type: ignore[no-untyped-call]
    head = model.get_output_embeddings()
    named = model.named_modules()
    return frozenset(
        name.rpartition(".")[2] for name, module in named if isinstance(module, torch.nn.Linear) and module is not head
    )
