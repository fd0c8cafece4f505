"""The weights that a server uses, read from the tensors it computes with. Runs in vLLM's workers.

A server has its own names and shapes: it packs some layers into one, and each of its workers may hold only a part.
Names here follow transformers, with ``.lora_A`` or ``.lora_B`` appended to a layer's name for its adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rllm_verl import verl_api
from rllm_verl.fingerprint import fingerprints

Range = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """The part of a tensor that one worker holds.

    Attributes:
        tensor: Values of the part.
        rows: Range of rows in the whole tensor.
        columns: Range of columns in the whole tensor; None for a vector.
    """

    tensor: torch.Tensor
    rows: Range
    columns: Range | None

    def place(self) -> dict[str, Any]:
        """Returns where the part is in the whole tensor, and its precision, as a JSON object."""
        columns = None if self.columns is None else list(self.columns)
        return {"rows": list(self.rows), "columns": columns, "dtype": str(self.tensor.dtype).removeprefix("torch.")}


class ReportingWorker(verl_api.use("vLLMColocateWorkerExtension")):  # type: ignore[misc]
    """verl's extension of vLLM's workers, which also reports the tensors they use."""

    def report_served(self, names: list[str]) -> dict[str, Any]:
        """Reports the adapters and some tensors.

        Args:
            names: Names of tensors.

        Returns:
            JSON object: ``adapter`` (``rank``, ``scaling``; None without one), and ``tensors`` by name, with None for
            tensors whose shape differs from transformers, such as experts.
        """
        manager = getattr(self.model_runner, "lora_manager", None)
        served = Served(self.model_runner.model, None if manager is None else manager._adapter_manager)
        parts = {name: served.part(name) for name in names}
        found = {name: part for name, part in parts.items() if part is not None}
        identities = fingerprints(part.tensor for part in found.values())
        reported = {
            name: part.place() | identity.to_json()
            for (name, part), identity in zip(found.items(), identities, strict=True)
        }
        return {"adapter": served.adapter(), "tensors": {name: reported.get(name) for name in names}}


class Served:
    """Finds tensors in the model of one worker.

    Args:
        model: Model of vLLM.
        adapters: vLLM's adapter manager, or None without adapters.
    """

    def __init__(self, model: Any, adapters: Any) -> None:
        self._model = model
        self._adapters = adapters
        packed = getattr(model, "packed_modules_mapping", None) or {}
        self._packed = {part: (whole, parts.index(part)) for whole, parts in packed.items() for part in parts}
        # Where vLLM keeps the adapters of its forward pass. verl always loads them under the same number.
        self._number = verl_api.use("VLLM_LORA_INT_ID")
        slots = [] if adapters is None else list(adapters.lora_index_to_id)
        self._slot = slots.index(self._number) if self._number in slots else None

    def adapter(self) -> dict[str, Any] | None:
        """Rank and scaling of the adapters that the server uses; None without adapters."""
        if self._slot is None:
            return None
        found = self._adapters._registered_adapters[self._number]
        layer = next(iter(found.loras.values()))
        alphas = getattr(layer, "lora_alphas", None) or [layer.lora_alpha]
        return {"rank": found.rank, "scaling": next(alpha for alpha in alphas if alpha is not None) / found.rank}

    def part(self, name: str) -> Part | None:
        """Returns this worker's part of a tensor; None if it cannot be found, or has another shape here."""
        place, _, leaf = name.rpartition(".")
        parent, _, last = place.rpartition(".")
        whole, index = self._packed.get(last, (last, 0))
        try:
            layer = self._model.get_submodule(f"{self._renamed(parent)}.{whole}".removeprefix("."))
        except AttributeError:
            return None
        if leaf in ("lora_A", "lora_B"):
            return self._adapter_part(layer, leaf, index)
        base = layer.base_layer if isinstance(layer, BaseLayerWithLoRA) else layer
        tensor = getattr(base, leaf, None)
        return None if tensor is None else _weight_part(base, tensor, index)

    def _renamed(self, parent: str) -> str:
        """Returns vLLM's name of a module that contains layers; its own mapper would also rename packed layers."""
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        if mapper is None or not parent:
            return parent
        mapped = mapper.apply_list([f"{parent}.weight"])
        return str(mapped[0]).removesuffix(".weight") if mapped else parent

    def _adapter_part(self, layer: Any, leaf: str, index: int) -> Part | None:
        if self._slot is None or not isinstance(layer, BaseLayerWithLoRA):
            return None
        rank, base = self._adapters._registered_adapters[self._number].rank, layer.base_layer
        rows, _, columns = _split(base, index)
        if leaf == "lora_A":
            down = layer.lora_a_stacked[index][self._slot, 0, :rank]
            start = 0 if columns is None else columns[0]
            return Part(down, (0, rank), (start, start + down.shape[1]))
        up = layer.lora_b_stacked[index][self._slot, 0, :, :rank]
        return Part(up, (rows[0], rows[0] + up.shape[0]), (0, rank))


def _weight_part(base: Any, tensor: torch.Tensor, index: int) -> Part | None:
    if isinstance(base, LinearBase) and not isinstance(base.quant_method, UnquantizedLinearMethod):
        return None
    rows, here, columns = _split(base, index)
    if isinstance(base, LinearBase | VocabParallelEmbedding):
        tensor = tensor[here[0] : here[1]]
    else:
        rows = (0, tensor.shape[0])
    if tensor.dim() == 1:
        return Part(tensor, rows, None)
    start = columns[0] if columns is not None else 0
    return Part(tensor, rows, (start, start + tensor.shape[1])) if tensor.dim() == 2 else None


def _split(base: Any, index: int) -> tuple[Range, Range, Range | None]:
    """Returns a packed layer's part as three ranges: rows of the whole, rows of this worker, columns of the whole."""
    if isinstance(base, QKVParallelLinear):
        sizes = [base.num_heads * base.head_size, *[base.num_kv_heads * base.head_size] * 2]
        shard = base.tp_rank if index == 0 else base.tp_rank // base.num_kv_head_replicas
    elif isinstance(base, MergedColumnParallelLinear):
        sizes, shard = [size // base.tp_size for size in base.output_sizes], base.tp_rank
    elif isinstance(base, ColumnParallelLinear):
        sizes, shard = [base.output_size_per_partition], base.tp_rank
    elif isinstance(base, VocabParallelEmbedding):
        indices = base.shard_indices
        rows = (indices.org_vocab_start_index, indices.org_vocab_end_index)
        return rows, (0, rows[1] - rows[0]), None
    elif isinstance(base, RowParallelLinear):
        start = base.tp_rank * base.input_size_per_partition
        whole = (0, base.output_size)
        return whole, whole, (start, start + base.input_size_per_partition)
    elif isinstance(base, LinearBase):
        sizes, shard = [base.output_size], 0
    else:
        return (0, 0), (0, 0), None
    size, first = sizes[index], sum(sizes[:index])
    return (shard * size, (shard + 1) * size), (first, first + size), None
