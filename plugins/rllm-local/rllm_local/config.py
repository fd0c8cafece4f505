"""``[local]``: the backend's section of the run file. Light: no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rllm_core.config import Section


class LoRAConfig(Section):
    """``[local.lora]``: train adapters instead of all weights."""

    rank: Annotated[int, Field(ge=1, description="Rank of the adapters.")] = 16
    alpha: Annotated[float, Field(gt=0, description="Adapters are scaled by alpha / rank.")] = 32.0
    target_modules: Annotated[
        tuple[str, ...], Field(description="Names of the layers that get adapters; empty is every linear layer.")
    ] = ()


class LocalConfig(Section):
    """``[local]``: the embedded backend."""

    device: Annotated[
        str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto is the first GPU, or else the CPU.")
    ] = "auto"
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Field(description="Precision of the forward passes. Trained weights are float32 either way."),
    ] = "float32"
    generation: Annotated[
        Literal["colocated", "separated"],
        Field(
            description="colocated samples and trains in turns, with the same numbers on every run. separated samples "
            "from a copy of the weights in a thread of its own while training goes on; asynchronous training needs it."
        ),
    ] = "colocated"
    threads: Annotated[
        int,
        Field(
            ge=0,
            description="CPU threads; 0 is one for models below 5 M parameters, else torch's choice, which separated "
            "generation and training share. A number is for each of the two.",
        ),
    ] = 0
    matmul_precision: Annotated[
        Literal["auto", "highest", "high", "medium"],
        Field(
            description="torch's float32 matmul precision on the CPU. auto takes medium for models from 5 M parameters "
            "if a probe shows that it still computes float32 on this CPU."
        ),
    ] = "auto"
    packing: Annotated[
        Literal["prefix", "padded"],
        Field(description="prefix encodes a prompt that samples share once; padded gives every sample its own row."),
    ] = "prefix"
    max_batch_tokens: Annotated[
        int, Field(ge=1, description="Most positions per forward and backward; on the CPU never more than 4096.")
    ] = 8192
    max_batch_rows: Annotated[int, Field(ge=1, description="Sequences sampled at a time.")] = 512
    starter_seed: Annotated[
        int, Field(ge=0, description="Seed of the starter model, which is used when model.path is empty.")
    ] = 0
    trust_remote_code: Annotated[
        bool, Field(description="Run Python code that comes with the model. Only for models you trust.")
    ] = False
    lora: Annotated[LoRAConfig | None, Field(description="Train adapters; unset trains all weights.")] = None
