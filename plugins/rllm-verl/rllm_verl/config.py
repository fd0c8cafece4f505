"""``[verl]``: the backend's section of the run file, mostly hardware. Imports neither torch nor verl."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rllm_core.config import Section


class LoRAConfig(Section):
    """``[verl.lora]``: train adapters instead of all weights."""

    rank: Annotated[int, Field(ge=1, description="Rank of the adapters.")] = 16
    alpha: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="Scale of the adapters, which is alpha / rank.")
    ] = 32.0
    target_modules: Annotated[
        tuple[str, ...], Field(description="Names of the layers that get adapters. If empty, all linear layers.")
    ] = ()
    adapter: Annotated[
        str,
        Field(
            description="Folder with PEFT adapters to start from, the same path on all machines. The run takes over "
            "their shape, so the other keys may be left out."
        ),
    ] = ""


class VerlConfig(Section):
    """``[verl]``: training with verl's workers and sampling with its vLLM servers, on Ray."""

    placement: Annotated[
        Literal["colocated", "separated"],
        Field(
            description="Devices of the servers. colocated: the trainer's devices; the two take turns. separated: "
            "their own (rollout_nodes x rollout_devices_per_node); required for asynchronous training."
        ),
    ] = "colocated"
    device: Annotated[
        Literal["cuda", "npu", "cpu"],
        Field(description="Device type. cpu needs a platform added through verl's extension points."),
    ] = "cuda"
    nodes: Annotated[int, Field(ge=1, description="Number of training machines.")] = 1
    devices_per_node: Annotated[int, Field(ge=1, description="Training devices per machine.")] = 1
    rollout_nodes: Annotated[int, Field(ge=1, description="Number of server machines (separated only).")] = 1
    rollout_devices_per_node: Annotated[
        int, Field(ge=1, description="Server devices per machine (separated only).")
    ] = 1
    tensor_parallel: Annotated[
        int,
        Field(
            ge=1,
            description="Number of devices each server's model is split across: a divisor of the devices per machine, "
            "or a multiple of them.",
        ),
    ] = 1
    strategy: Annotated[
        Literal["fsdp2", "fsdp", "megatron"], Field(description="Sharding strategy of the trained model.")
    ] = "fsdp2"
    sequence_parallel: Annotated[
        int, Field(ge=1, description="Number of devices each sequence is split across (Ulysses; fsdp2 and fsdp only).")
    ] = 1
    dtype: Annotated[
        Literal["bfloat16", "float32"],
        Field(description="Precision of forward passes and servers. Trained weights are always float32."),
    ] = "bfloat16"
    attention: Annotated[
        str,
        Field(
            description="Attention implementation in transformers. sdpa works without flash-attn, but slowly in "
            "bfloat16, and is required for float32 and not possible with sequence_parallel above 1."
        ),
    ] = "flash_attention_2"
    gradient_checkpointing: Annotated[bool, Field(description="Recompute activations instead of storing them.")] = True
    offload: Annotated[
        tuple[Literal["parameters", "optimizer"], ...],
        Field(description="Training state to keep in CPU memory while it is not in use (fsdp2 and fsdp only)."),
    ] = ()
    max_tokens_per_device: Annotated[
        int,
        Field(ge=1, description="Token budget of one micro-batch on one device. Must hold the longest sequence."),
    ] = 16384
    mini_batches: Annotated[
        int,
        Field(
            ge=1,
            description="Mini-batches per optimizer step, equal in size; verl updates the weights after each. A step "
            "whose trainers have fewer samples has fewer. "
            "Above 1, ratios change within a step, even with old_logprob = 'recompute'.",
        ),
    ] = 1
    max_model_tokens: Annotated[
        int | None,
        Field(ge=2, description="Maximum length of prompt plus completion. Defaults to the model's maximum."),
    ] = None
    max_batch_rows: Annotated[int, Field(ge=1, description="Maximum concurrent sequences per server.")] = 256
    max_batch_tokens: Annotated[int, Field(ge=1, description="Maximum tokens per forward pass of a server.")] = 8192
    server_memory_share: Annotated[
        float, Field(gt=0, le=1, description="Share of device memory for a server's weights and cache.")
    ] = 0.5
    cuda_graphs: Annotated[
        bool, Field(description="Capture CUDA graphs in the servers: slower to start, faster to sample.")
    ] = True
    release_memory: Annotated[
        bool, Field(description="Release the servers' memory while the trainer works (colocated only).")
    ] = True
    checkpoint_engine: Annotated[
        str,
        Field(
            description="verl checkpoint engine that transfers weights: nccl, nixl, ..., or one that "
            "checkpoint_engine_module registers (separated only)."
        ),
    ] = "nccl"
    checkpoint_engine_module: Annotated[
        str, Field(description="Python module to import, which registers another checkpoint engine with verl.")
    ] = ""
    sync_bucket_mb: Annotated[int, Field(ge=1, description="Weights sent per transfer, in MiB.")] = 2048
    sync_tolerance: Annotated[
        float | None,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Largest allowed difference between the log-probabilities of trainer and server, in nats: the "
            "mean over 128 sampled tokens (32 in later checks that compare all tensors that a sync sends), without the "
            "largest eighth. Checked on every server after weight syncs (see sync_numbers_every); the run ends if a "
            "server exceeds it twice. Defaults to 0.01 for float32 and 0.1 for bfloat16, and to twice that for a "
            "mixture of experts.",
        ),
    ] = None
    sync_check_every: Annotated[
        int,
        Field(
            ge=1,
            description="Weight syncs from one check of the servers to the next. The first sync of a run, and the "
            "first after resuming, are always checked.",
        ),
    ] = 1
    sync_numbers_every: Annotated[
        int | None,
        Field(
            ge=1,
            description="Checks from one comparison of log-probabilities to the next; tensors are compared at every "
            "check. The first two checks of a run, and after resuming, always compare both. Defaults to 8 where every "
            "check compares all tensors that a sync sends, as with adapters that are sent alone, and to 1 elsewhere.",
        ),
    ] = None
    lora: Annotated[
        LoRAConfig | None,
        Field(description="Train adapters (fsdp2 and fsdp only). If unset, train all weights."),
    ] = None
    old_logprob: Annotated[
        Literal["recompute", "last_sync", "bypass"] | None,
        Field(
            description="Source of the old log-probabilities in ratios: the weights before the step (recompute), "
            "the weights of the last sync (last_sync), or the servers at sampling time (bypass). The first two need "
            "algorithm.proximal_policy = 'forward', bypass needs 'rollout'. By default, that setting decides."
        ),
    ] = None
    ray_address: Annotated[
        str,
        Field(
            pattern=r"^(|auto|ray://[^\s/?#@]+:\d+|[^\s/?#@:]+:\d+)$",
            description="Ray cluster to join: auto (the one this machine belongs to) or host:port of its head. "
            "Empty starts one on this machine for this run only.",
        ),
    ] = ""
    environment: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...],
        Field(description="Names of additional environment variables to forward to workers."),
    ] = ()
    overrides: Annotated[
        dict[str, Any],
        Field(
            description="Additional settings of verl's own configuration, by dotted key, for example "
            '"actor_rollout_ref.rollout.expert_parallel_size" = 8.'
        ),
    ] = Field(default_factory=dict)
    trust_remote_code: Annotated[
        bool, Field(description="Run Python code that comes with the model. Enable only for models you trust.")
    ] = False

    @property
    def trainers(self) -> int:
        """Number of training devices."""
        return self.nodes * self.devices_per_node

    @property
    def data_parallel(self) -> int:
        """Data-parallel size: number of trainer groups with different rows."""
        return self.trainers // self.sequence_parallel

    @property
    def server_devices(self) -> int:
        """Number of sampling devices."""
        if self.placement == "colocated":
            return self.trainers
        return self.rollout_nodes * self.rollout_devices_per_node

    @property
    def devices(self) -> int:
        """Number of devices the run needs."""
        return self.trainers + (self.server_devices if self.placement == "separated" else 0)
