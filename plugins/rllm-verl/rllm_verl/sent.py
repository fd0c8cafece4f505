"""The tensors that a weight sync sends, as the servers should have them. Runs in the trainers, on all ranks at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rllm_verl.adapter_weights import NAME, gather, layers, merged_weight, plain
from rllm_verl.fingerprint import fingerprints
from rllm_verl.lora import Sync


class SentTensors:
    """The trained model under the names of transformers; see `rllm_verl.served`.

    Args:
        module: Model, sharded by FSDP2.
        device: Device to gather on.
        sync: Kind of weight sync, see `rllm_verl.lora.sync_of`.
    """

    def __init__(self, module: torch.nn.Module, device: Any, sync: Sync) -> None:
        self._device = device
        self._sync = sync
        self._adapted = layers(module)
        self._weights = {plain(name): weight for name, weight in module.state_dict().items() if ".lora_" not in name}

    def names(self) -> dict[str, list[str]]:
        """Returns the names of ``weights``, and of ``adapters`` if they are sent separately."""
        adapters = sorted(self._adapted) if self._sync == "adapter" else []
        return {
            "weights": sorted(self._weights),
            "adapters": [f"{name}.{side}" for name in adapters for side in ("lora_A", "lora_B")],
        }

    @torch.no_grad()
    def report(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns fingerprints of parts of tensors.

        Args:
            parts: ``name``, ``rows``, ``columns`` and ``dtype`` of each; parts of one tensor follow each other.

        Returns:
            A fingerprint for each.
        """
        return [identity.to_json() for identity in fingerprints(self._parts(parts))]

    def _parts(self, parts: list[dict[str, Any]]) -> Iterator[torch.Tensor]:
        name, whole = "", torch.empty(0)
        for part in parts:
            if part["name"] != name:
                name = part["name"]
                whole = self._whole(name)
            values = whole[slice(*part["rows"])]
            if part["columns"] is not None:
                values = values[:, slice(*part["columns"])]
            values = values.to(getattr(torch, part["dtype"]))
            if name.endswith(".lora_B"):
                values = values * self._adapted[name.rpartition(".")[0]].scaling[NAME]  # as vLLM does after the cast
            yield values

    def _whole(self, name: str) -> torch.Tensor:
        place, _, leaf = name.rpartition(".")
        layer: Any = self._adapted.get(place)
        if leaf in ("lora_A", "lora_B"):
            return gather(getattr(layer, leaf)[NAME].weight, self._device)
        weight = self._weights[name]
        if self._sync == "merged" and layer is not None and leaf == "weight":
            return merged_weight(layer, weight, self._device)
        return gather(weight, self._device)
