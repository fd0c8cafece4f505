"""``[local]``: the backend's section of the run file. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rllm_core.config import Section


class LoRAConfig(Section):
    """``[local.lora]``: train adapters instead of all weights."""

    rank: Annotated[int, Field(ge=1, description="Rank of the adapters.")] = 16
    alpha: Annotated[float, Field(gt=0, description="Scale of the adapters, which is alpha / rank.")] = 32.0
    target_modules: Annotated[
        tuple[str, ...], Field(description="Names of the layers that get adapters. If empty, all linear layers.")
    ] = ()


class LocalConfig(Section):
    """``[local]``: the in-process backend."""

    device: Annotated[
        str,
        Field(
            pattern=r"^(auto|cpu|cuda(:\d+)?)$",
            description="Device to run on. auto selects the first GPU, or the CPU if there is none.",
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Field(
            description="Precision of the forward passes. auto is bfloat16 on a GPU and float32 on the CPU. Trained "
            "weights are always float32."
        ),
    ] = "auto"
    generation: Annotated[
        Literal["colocated", "separated"],
        Field(
            description="Placement of generation. colocated alternates between sampling and training, and is "
            "deterministic on the CPU. separated samples from a copy of the weights in another thread while training "
            "continues; asynchronous training requires it."
        ),
    ] = "colocated"
    threads: Annotated[
        int,
        Field(
            ge=0,
            description="CPU threads; separated generation and training use this number each. 0 means one for models "
            "below 5 M parameters, and otherwise torch's default, divided between the two.",
        ),
    ] = 0
    matmul_precision: Annotated[
        Literal["auto", "highest", "high", "medium"],
        Field(
            description="float32 matmul precision of torch. On the CPU, auto selects medium for models from 5 M "
            "parameters if a probe shows that it still computes in float32 on this CPU. On a GPU, auto is high (TF32)."
        ),
    ] = "auto"
    packing: Annotated[
        Literal["prefix", "padded"],
        Field(
            description="Layout of training batches. prefix encodes a prompt shared by several samples once; padded "
            "gives every sample its own row."
        ),
    ] = "prefix"
    max_batch_tokens: Annotated[
        int,
        Field(
            ge=0,
            description="Maximum positions per forward-backward pass. Capped at 4096 on the CPU. 0 means 8192 on a GPU "
            "and 4096 on the CPU, or fewer if training with these does not fit in memory.",
        ),
    ] = 0
    gradient_checkpointing: Annotated[
        Literal["auto", "on", "off"],
        Field(
            description="Whether to keep only the inputs of layers for the backward pass, and compute the rest again. "
            "auto is on for a GPU and off for the CPU."
        ),
    ] = "auto"
    max_batch_rows: Annotated[int, Field(ge=1, description="Maximum sequences sampled concurrently.")] = 512
    max_cache_gb: Annotated[
        float,
        Field(
            ge=0,
            description="Maximum size of the cache of the sequences sampled concurrently, in GB. 0 means a quarter of "
            "the memory of a GPU, and no limit on the CPU.",
        ),
    ] = 0.0
    starter_seed: Annotated[
        int, Field(ge=0, description="Seed of the starter model, which is used if model.path is empty.")
    ] = 0
    trust_remote_code: Annotated[
        bool, Field(description="Run Python code shipped with the model. Enable only for models you trust.")
    ] = False
    lora: Annotated[LoRAConfig | None, Field(description="Train adapters. If unset, train all weights.")] = None

    def resolved(self, *, on_gpu: bool) -> LocalConfig:
        """Returns these settings with the values for a device in place of ``auto``."""
        dtype = ("bfloat16" if on_gpu else "float32") if self.dtype == "auto" else self.dtype
        is_automatic = self.gradient_checkpointing == "auto"
        checkpointing = ("on" if on_gpu else "off") if is_automatic else self.gradient_checkpointing
        return self.model_copy(update={"dtype": dtype, "gradient_checkpointing": checkpointing})
