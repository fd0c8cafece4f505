"""Adapters of a model sharded by FSDP: merges them into its weights, gathers them, and saves them for PEFT.

Nothing here changes the model. Every function that gathers must run on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from rllm_verl.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS

NAME = "default"  # PEFT's name of the adapters
PREFIX, BASE = "base_model.model.", ".base_layer"


def gather(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Returns the whole of a sharded tensor, on ``device``."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.size() == 1:  # its only rank has all of it
        return tensor.to_local().detach().to(device)
    tensor = tensor.detach().to(device)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def layers(module: torch.nn.Module) -> dict[str, LoraLayer]:
    """Returns the layers with adapters, keyed by their names in the plain model."""
    return {plain(name): layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}


def plain(name: str) -> str:
    """Returns a module's or weight's name in a model without adapters."""
    return name.removeprefix(PREFIX).replace(BASE, "")


@torch.no_grad()
def merged(module: torch.nn.Module, device: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all weights under the names of the plain model, in the model's precision, with the adapters merged in."""
    adapted = layers(module)
    for name, weight in module.state_dict().items():
        if ".lora_" in name:
            continue
        layer = adapted.get(plain(name).removesuffix(".weight"))
        yield plain(name), gather(weight, device).clone() if layer is None else merged_weight(layer, weight, device)


def merged_weight(layer: Any, weight: torch.Tensor, device: Any) -> torch.Tensor:
    """Returns the whole weight of a layer, with its adapters merged in."""
    down, up = (gather(part[NAME].weight, device) for part in (layer.lora_A, layer.lora_B))
    merged: torch.Tensor = gather(weight, device) + (up @ down) * layer.scaling[NAME]
    return merged


@torch.no_grad()
def gathered(module: torch.nn.Module, device: Any) -> dict[str, torch.Tensor]:
    """Returns the whole adapters in CPU memory, under the names in PEFT's files."""
    return {
        name.replace(f".{NAME}.", "."): gather(weight, device).cpu().contiguous()
        for name, weight in module.state_dict().items()
        if ".lora_" in name
    }


def save(folder: Path, weights: dict[str, torch.Tensor], module: Any, base: str) -> None:
    """Writes adapters for PEFT.

    Args:
        folder: Folder to write to.
        weights: Adapters, under the names in PEFT's files.
        module: Model with these adapters.
        base: Folder or Hugging Face ID of the model that they belong to.
    """
    described = module.peft_config[NAME].to_dict()
    targets = described["target_modules"]
    described |= {
        "base_model_name_or_path": str(Path(base).resolve()) if Path(base).is_dir() else base,
        "inference_mode": True,
        "target_modules": sorted(targets) if isinstance(targets, set) else targets,
        **{name: getattr(described[name], "value", described[name]) for name in ("peft_type", "task_type")},
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / ADAPTER_WEIGHTS)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")
