"""Calculates the memory that a run of backend ``verl`` needs. Imports neither torch nor verl.

``docs/memory.md`` explains the formulas. Line numbers in comments are those of verl 0.9.1.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rllm_core.config import RunConfig
from rllm_core.memory import Device, MemoryEstimate, MemoryUse
from rllm_core.memory.transformer import BYTES, FLOAT32, TransformerShape, adam_state_bytes
from rllm_verl.config import VerlConfig
from rllm_verl.lora import adapter_of, sync_of

MIB = 2**20
# Bytes per logit that exist at once in the loss, without entropy and with it (`rllm_verl.entropy`), measured with
# verl's functions on the CPU. Two are by reading: flash-attn's cross-entropy writes its gradient into the logits, so
# there are only these (torch_functional.py:110). In bfloat16 without it, the log-probabilities of all rows are kept
# (torch_functional.py:200), which autocast makes float32 on a GPU.
LOGIT_BYTES: dict[tuple[str, bool], tuple[int, int]] = {
    ("float32", False): (16, 16),
    ("bfloat16", False): (8, 10),
    ("bfloat16", True): (2, 8),
}
# Outside of torch's tensors: CUDA, NCCL, cuBLAS and kernels; and the CUDA graphs of a server, which its share does not
# contain.
TRAINER_CONTEXT_BYTES = 1_500_000_000
SERVER_CONTEXT_BYTES = 1_000_000_000
CUDA_GRAPH_BYTES = 1_000_000_000
BUFFERS_OF_SENDER = BUFFERS_OF_RECEIVER = 2  # nccl_checkpoint_engine.py:165-173
SERVER_LOGIT_BYTES = 14  # bfloat16, and in float32 the logits, log-probabilities and a sorted copy

MORE_DEVICES = "use more training devices (verl.nodes, verl.devices_per_node)"
TRAINING_ADVICE = (
    "lower verl.max_tokens_per_device (verl.sequence_parallel lets it be below the longest sequence), "
    f"or {MORE_DEVICES}; verl.offload does not help here, because verl loads everything back to train"
)
SHARING_ADVICE = f'lower verl.server_memory_share, set verl.offload = ["parameters", "optimizer"], or {MORE_DEVICES}'
SERVER_ADVICE = (
    "raise verl.server_memory_share or verl.tensor_parallel, or lower verl.max_model_tokens or verl.max_batch_tokens"
)
SERVER_START_ADVICE = "lower verl.server_memory_share, or raise verl.tensor_parallel"
REMARKS = ("unused parts of memory blocks; logits and one recomputed layer are added, which is an upper bound",)
SYNC_ADVICE = "lower verl.sync_bucket_mb or verl.server_memory_share"

Parts = list[tuple[str, int]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of one run, per device.

    Attributes:
        actor: verl's section ``actor_rollout_ref.actor``, which has settings that the run file can only override.
        capacity: Memory of a device in bytes; None if unknown.
    """

    config: RunConfig
    verl: VerlConfig
    actor: dict[str, Any]
    shape: TransformerShape
    capacity: int | None

    def share(self, parameters: int) -> int:
        """Parameters on one training device, of all ``parameters``."""
        size = self.actor["fsdp_config"].get("fsdp_size", -1)
        return -(-parameters // (size if size > 0 else self.verl.trainers))

    @cached_property
    def adapters(self) -> int:
        """Number of parameters in all adapters; 0 without adapters."""
        adapter = adapter_of(self.verl)
        if adapter is None:
            return 0
        sizes = _linear_layers(self.shape)
        names = [name.rpartition(".")[2] for name in adapter.target_modules] or sizes
        # The size of an unusual layer is unknown, so assume that of the largest.
        largest = max(sizes.values())
        return self.shape.layers * adapter.rank * sum(sizes.get(name, largest) for name in names)

    @property
    def parameters(self) -> int:
        """Parameters of the model with its adapters."""
        return self.shape.parameters + self.adapters

    @property
    def trained(self) -> int:
        """Parameters that have a gradient."""
        return self.adapters or self.shape.parameters

    @property
    def keeps_states_on_cpu(self) -> bool:
        """Whether FSDP2 keeps weights, gradients and optimizer in CPU memory all the time."""
        return bool(self.actor["fsdp_config"].get("offload_policy"))

    def states(self, *, training: bool, syncing: bool = False) -> Parts:
        """Float32 weights, gradients and Adam's moments, sharded over the trainers (ZeRO-3, see the core's module).

        verl loads offloaded states for the whole update (workers/engine/base.py:314-335), and drops gradients after it.
        It also loads the weights to send adapters (transformer_impl.py:988-991).
        """
        if self.keeps_states_on_cpu:
            return []
        offload = set() if training else set(self.verl.offload)
        if syncing and sync_of(self.verl) == "adapter":
            offload.discard("parameters")
        parts = [("weights", 0 if "parameters" in offload else FLOAT32 * self.share(self.parameters))]
        if training:
            # Without a sync per micro-batch, FSDP keeps gradients unsharded (transformer_impl.py:690-720).
            unsharded = self.actor["fsdp_config"].get("use_no_sync_for_gradient_accumulation", False)
            parts.append(("gradients", FLOAT32 * (self.trained if unsharded else self.share(self.trained))))
        return [*parts, ("optimizer", 0 if "optimizer" in offload else adam_state_bytes(self.share(self.trained)))]

    @property
    def logits(self) -> int:
        """Logits of one micro-batch, and the tensors that the loss computes from them."""
        algorithm = self.config.algorithm
        has_entropy = max(algorithm.entropy_coefficient, algorithm.entropy_coefficient_final or 0) > 0
        is_flash = self.verl.attention.startswith("flash") and self.verl.dtype == "bfloat16"
        size = LOGIT_BYTES[self.verl.dtype, is_flash][has_entropy]
        if self.config.rollout.temperature != 1 and is_flash and not has_entropy:
            size *= 2  # before and after the division by the temperature (transformer_impl.py:98-103)
        return self.shape.logits_bytes(self.verl.max_tokens_per_device, size)

    @property
    def gathered(self) -> int:
        """Whole layers that FSDP2 gathers: one in use and the next, and the gradient of one before it is scattered.

        Embedding and head are gathered in the same way, as separate units, or as one unit that stays gathered if they
        are tied (fsdp_utils.py:549).
        """
        size, shape = BYTES[self.verl.dtype], self.shape
        unit = shape.vocabulary * shape.hidden
        if self.adapters:  # the gradient belongs to a layer's adapters, far smaller than the layer
            return max(shape.layer_parameters * 2 * size + (unit * size if shape.tied else 0), unit * 2 * size)
        layers = shape.layer_parameters * (3 * size + FLOAT32) + (unit * size if shape.tied else 0)
        return max(layers, unit * (2 * size + FLOAT32))

    @property
    def activations(self) -> int:
        """Activations of one micro-batch."""
        return self.shape.activation_bytes(
            self.verl.max_tokens_per_device, self.verl.dtype, checkpointing=self.verl.gradient_checkpointing
        )

    @property
    def server_weights(self) -> int:
        """Weights of a server on one device, and the adapters if they are sent on their own."""
        served = self.parameters if sync_of(self.verl) == "adapter" else self.shape.parameters
        return BYTES[self.verl.dtype] * served // self.verl.tensor_parallel

    @property
    def server_needs(self) -> Parts:
        """Minimum memory of a server on one device: for weights, one pass, and one sequence of the maximum length."""
        verl, shape, parallel = self.verl, self.shape, self.verl.tensor_parallel
        size = BYTES[verl.dtype]
        kv_shards = min(parallel, shape.kv_heads)
        wide = max(1, shape.active_experts) * 2 * shape.intermediate // parallel + 4 * shape.hidden
        passes = verl.max_batch_tokens * wide * size + shape.logits_bytes(verl.max_batch_rows, SERVER_LOGIT_BYTES)
        tokens = verl.max_model_tokens or 0
        return [
            ("weights", self.server_weights),
            ("activations", passes),
            ("cache of one sequence", shape.cache_bytes(tokens, size) // kv_shards),
        ]

    @property
    def server_share(self) -> Parts:
        """Memory of an awake server: its whole share, where the cache takes what the rest leaves free."""
        needs = sum(size for _, size in self.server_needs)
        whole = needs if self.capacity is None else int(self.verl.server_memory_share * self.capacity)
        return [("server weights", self.server_weights), ("cache", max(0, whole - self.server_weights))]

    @property
    def server_context(self) -> int:
        """Memory of a server outside of its share."""
        return SERVER_CONTEXT_BYTES + (CUDA_GRAPH_BYTES if self.verl.cuda_graphs else 0)

    @property
    def largest_weight(self) -> int:
        """The largest weight; trainers send float32 (bucketed_weight_transfer.py:120-126)."""
        return FLOAT32 * self.shape.largest_parameters

    @property
    def merged(self) -> int:
        """Memory to merge adapters: a layer's weight and the product of its adapters (`rllm_verl.adapter_weights`)."""
        if sync_of(self.verl) != "merged":
            return 0
        return 2 * FLOAT32 * self.shape.hidden * max(self.shape.intermediate, self.shape.heads * self.shape.head_dim)

    @property
    def bucket(self) -> int:
        """One buffer of a weight sync."""
        return self.verl.sync_bucket_mb * MIB


def estimate(
    config: RunConfig,
    verl: VerlConfig,
    actor: dict[str, Any],
    shape: TransformerShape,
    capacity: int | None,
    *,
    has_servers: bool = True,
) -> MemoryEstimate:
    """Returns the memory of a run's devices and machines.

    Args:
        config: Run file.
        verl: Section ``[verl]`` of the run file.
        actor: verl's section ``actor_rollout_ref.actor``.
        shape: Shape of the model.
        capacity: Memory of each device in bytes; None if unknown.
        has_servers: Whether the run starts servers.
    """
    sizes = Sizes(config, verl, actor, shape, capacity)
    if not has_servers:
        phases = {"training": [*sizes.states(training=True), *_work(sizes), ("contexts", TRAINER_CONTEXT_BYTES)]}
        alone = _device("trainer", verl.trainers, capacity, phases)
        return MemoryEstimate(devices=(alone, _machine(sizes)), remarks=REMARKS)
    devices = _separated(sizes) if verl.placement == "separated" else [_colocated(sizes)]
    share = None if capacity is None else int(verl.server_memory_share * capacity)
    inside = {"generation": sizes.server_needs}
    devices.append(
        _device(f"server within its share of {verl.server_memory_share:g}", verl.server_devices, share, inside)
    )
    devices.append(_machine(sizes))
    return MemoryEstimate(devices=tuple(devices), remarks=REMARKS)


def _colocated(sizes: Sizes) -> Device:
    verl = sizes.verl
    asleep = [] if verl.release_memory else sizes.server_share
    contexts = [("contexts", TRAINER_CONTEXT_BYTES + sizes.server_context)]
    # Sent through CUDA IPC, a weight at a time: gathered, and in a bucket (bucketed_weight_transfer.py:183). The cache
    # is allocated after that (engine_workers.py:818).
    awake = [("server weights", sizes.server_weights)] if verl.release_memory else sizes.server_share
    phases = {
        "training": [*sizes.states(training=True), *_work(sizes), *asleep, *contexts],
        "weight sync": [
            *sizes.states(training=False, syncing=True),
            *awake,
            ("sync buffers", sizes.bucket + sizes.largest_weight),
            *contexts,
        ],
        "generation": [*sizes.states(training=False), *sizes.server_share, *contexts],
    }
    return _device("trainer with its server", verl.trainers, sizes.capacity, phases)


def _separated(sizes: Sizes) -> list[Device]:
    verl = sizes.verl
    contexts = [("contexts", TRAINER_CONTEXT_BYTES)]
    training = {
        "training": [*sizes.states(training=True), *_work(sizes), *contexts],
        "weight sync": [
            *sizes.states(training=False),
            ("sync buffers", BUFFERS_OF_SENDER * sizes.bucket + sizes.largest_weight),
            ("merged weights", sizes.merged),
            *contexts,
        ],
    }
    # Next to the server, another process receives into two buffers, merges a weight that is larger than one buffer, and
    # passes it on in a third buffer, or as it is (checkpoint_engine/base.py:595-632,
    # bucketed_weight_transfer.py:140-146).
    merged = 2 * sizes.largest_weight if sizes.largest_weight > sizes.bucket else 0
    outside = [("contexts", sizes.server_context)]
    sampling = {
        "generation": [*sizes.server_share, *outside],
        "weight sync": [
            *sizes.server_share,
            ("sync buffers", (BUFFERS_OF_RECEIVER + 1) * sizes.bucket + merged),
            *outside,
        ],
    }
    return [
        _device("trainer", verl.trainers, sizes.capacity, training),
        _device("server", verl.server_devices, sizes.capacity, sampling),
    ]


def _work(sizes: Sizes) -> Parts:
    return [
        ("gathered weights", sizes.gathered),
        ("logits", sizes.logits),
        ("activations", sizes.activations),
    ]


def _machine(sizes: Sizes) -> Device:
    """Memory of the first training machine's host, which loads the model for all.

    If embeddings are tied, each of its processes loads the whole model (transformer_impl.py:266).
    """
    verl, parameters = sizes.verl, sizes.parameters
    loading = parameters * FLOAT32 * (verl.devices_per_node if sizes.shape.tied else 1)
    here, trained = (FLOAT32 * -(-count // verl.nodes) for count in (parameters, sizes.trained))
    copies = (sizes.config.algorithm.kl.coefficient > 0 and verl.lora is None) + (verl.old_logprob == "last_sync")
    offload = ("parameters", "optimizer") if sizes.keeps_states_on_cpu else verl.offload
    states = here * ("parameters" in offload) + 2 * trained * ("optimizer" in offload)
    states += trained * sizes.keeps_states_on_cpu  # gradients
    # Servers with adapters keep the base model while they sleep (vllm_async_server.py:1303).
    is_kept = sync_of(verl) == "adapter" and verl.release_memory
    asleep = sizes.server_weights * verl.devices_per_node if is_kept else 0
    phases = {
        "start": [("weights", loading)],
        "training": [
            ("copies of the weights", trained * copies),
            ("offload", states),
            ("weights of sleeping servers", asleep),
        ],
    }
    return _device("host memory of a training machine", verl.nodes, None, phases)


def _linear_layers(shape: TransformerShape) -> dict[str, int]:
    """Inputs plus outputs of the linear layers of one transformer layer, by their usual names."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden, wide = shape.hidden, shape.intermediate
    attention = {
        "q_proj": hidden + queries,
        "k_proj": hidden + keys,
        "v_proj": hidden + keys,
        "o_proj": queries + hidden,
    }
    return attention | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden + wide)


def _device(name: str, count: int, capacity: int | None, phases: dict[str, Parts]) -> Device:
    if name == "server":
        advice = {"generation": "lower verl.server_memory_share", "weight sync": SYNC_ADVICE}
    elif name.startswith("server"):
        advice = {"generation": SERVER_ADVICE}
    else:
        advice = {"training": TRAINING_ADVICE, "generation": SHARING_ADVICE, "weight sync": SYNC_ADVICE, "start": ""}
    uses = tuple(
        MemoryUse(phase=phase, what=what, size_bytes=size)
        for phase, parts in phases.items()
        for what, size in parts
        if size
    )
    return Device(name=name, count=count, capacity_bytes=capacity, uses=uses, advice=advice)


def installed_bytes() -> int | None:
    """Returns the memory of this machine's smallest NVIDIA GPU, as the driver reports it; None without a GPU.

    Asks the driver's tool, because torch would start CUDA in this process.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    asked = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    found = [int(line) for line in asked.stdout.split() if line.isdigit()] if asked.returncode == 0 else []
    return min(found) * MIB if found else None


def advice(what: str, why: str) -> str:
    """Returns what to change after a failed call, to append to its message; empty if memory was not the cause.

    Args:
        what: Name of the call, as `rllm_verl.cluster.Cluster.call` gets it.
        why: Cause of the failure.
    """
    if "out of memory" not in why.lower() and "OutOfMemoryError" not in why:
        return ""
    if what == "starting the servers":
        return f"; {SERVER_START_ADVICE}"
    if "weight sync" in what or "waking" in what:
        return f"; {SYNC_ADVICE}"
    return f"; {TRAINING_ADVICE}"
