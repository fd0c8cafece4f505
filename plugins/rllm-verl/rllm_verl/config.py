"""``[verl]``: the backend's section of the run file, which is hardware but for three keys. Light: no torch, no verl."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rllm_core.config import Section


class VerlConfig(Section):
    """``[verl]``: training with verl's workers and sampling with its servers, on Ray."""

    placement: Annotated[
        Literal["colocated", "separated"],
        Field(
            description="colocated: trainer and servers share the same devices and take turns. separated: the servers "
            "have devices of their own (rollout_nodes x rollout_devices_per_node); asynchronous training needs it."
        ),
    ] = "colocated"
    device: Annotated[
        Literal["cuda", "npu", "cpu"],
        Field(description="Kind of device. cpu needs a platform that verl's own extension points provide."),
    ] = "cuda"
    nodes: Annotated[int, Field(ge=1, description="Machines with trainers.")] = 1
    devices_per_node: Annotated[int, Field(ge=1, description="Devices with trainers on each of them.")] = 1
    rollout_nodes: Annotated[int, Field(ge=1, description="separated: machines with servers.")] = 1
    rollout_devices_per_node: Annotated[
        int, Field(ge=1, description="separated: devices with servers on each of them.")
    ] = 1
    tensor_parallel: Annotated[int, Field(ge=1, description="Devices that one server's model is split over.")] = 1
    strategy: Annotated[
        Literal["fsdp2", "fsdp", "megatron"], Field(description="How verl shards the model that is trained.")
    ] = "fsdp2"
    sequence_parallel: Annotated[
        int, Field(ge=1, description="fsdp2, fsdp: devices that one sequence is split over (Ulysses).")
    ] = 1
    dtype: Annotated[
        Literal["bfloat16", "float32"],
        Field(description="Precision of forward passes and servers. Trained weights are float32 either way."),
    ] = "bfloat16"
    attention: Annotated[
        str, Field(description="Attention implementation of transformers; sdpa needs no flash-attn.")
    ] = "flash_attention_2"
    gradient_checkpointing: Annotated[bool, Field(description="Compute activations again instead of keeping them.")] = (
        True
    )
    offload: Annotated[
        tuple[Literal["parameters", "optimizer"], ...],
        Field(description="fsdp2, fsdp: what waits in the machine's memory while it is not needed."),
    ] = ()
    max_tokens_per_device: Annotated[
        int, Field(ge=1, description="Token budget of one micro-batch on one device; no sequence may be longer.")
    ] = 16384
    mini_batches: Annotated[
        int,
        Field(
            ge=1,
            description="Updates that verl makes of one optimizer step's samples, each with an equal share of them. "
            "Above 1, ratios move within a step even with old_logprob = 'recompute'.",
        ),
    ] = 1
    max_model_tokens: Annotated[
        int | None, Field(ge=2, description="Longest prompt plus completion; unset is what the model can.")
    ] = None
    max_batch_rows: Annotated[int, Field(ge=1, description="Sequences that one server samples at a time.")] = 256
    max_batch_tokens: Annotated[int, Field(ge=1, description="Tokens that one server computes per step.")] = 8192
    server_memory_share: Annotated[
        float, Field(gt=0, le=1, description="Share of a device's memory for a server's weights and cache.")
    ] = 0.5
    cuda_graphs: Annotated[
        bool, Field(description="Whether servers capture CUDA graphs: slow to start, then fast.")
    ] = True
    release_memory: Annotated[
        bool, Field(description="colocated: servers give their memory back while the trainer works.")
    ] = True
    checkpoint_engine: Annotated[
        str, Field(description="separated: how weights travel: nccl, nixl, ... or what checkpoint_engine_module adds.")
    ] = "nccl"
    checkpoint_engine_module: Annotated[
        str, Field(description="Python module that registers one more checkpoint engine with verl; imported.")
    ] = ""
    sync_bucket_mb: Annotated[int, Field(ge=1, description="Megabytes (2^20) of weights sent at a time.")] = 2048
    sync_tolerance: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="After every weight sync, a server samples some tokens whose log-probabilities the trainer "
            "computes too. The run ends if the two differ by more than this on average.",
        ),
    ] = 0.1
    old_logprob: Annotated[
        Literal["recompute", "last_sync", "bypass"] | None,
        Field(
            description="What computes the log-probabilities that ratios begin at: the weights before the step "
            "(recompute), those of the last sync (last_sync), both with algorithm.proximal_policy = 'forward'; or the "
            "servers, as they sampled (bypass), with 'rollout'. Unset follows algorithm.proximal_policy."
        ),
    ] = None
    ray_address: Annotated[
        str,
        Field(
            pattern=r"^(|auto|ray://[^\s/?#@]+:\d+|[^\s/?#@:]+:\d+)$",
            description="The Ray cluster to join: auto is the one that this machine is a part of, host:port names its "
            "head. Empty starts one on this machine for this run only.",
        ),
    ] = ""
    environment: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...],
        Field(description="Names of further environment variables that workers get from this process."),
    ] = ()
    overrides: Annotated[
        dict[str, Any],
        Field(
            description="Further settings of verl's own configuration by dotted key, for what has no key here: "
            '"actor_rollout_ref.rollout.expert_parallel_size" = 8.'
        ),
    ] = Field(default_factory=dict)
    trust_remote_code: Annotated[
        bool, Field(description="Run Python code that comes with the model. Only for models you trust.")
    ] = False

    @property
    def trainers(self) -> int:
        """Devices that train."""
        return self.nodes * self.devices_per_node

    @property
    def data_parallel(self) -> int:
        """Groups of trainers that each see other rows."""
        return self.trainers // self.sequence_parallel

    @property
    def server_devices(self) -> int:
        """Devices that sample."""
        if self.placement == "colocated":
            return self.trainers
        return self.rollout_nodes * self.rollout_devices_per_node

    @property
    def devices(self) -> int:
        """Devices that a run needs."""
        return self.trainers + (self.server_devices if self.placement == "separated" else 0)
