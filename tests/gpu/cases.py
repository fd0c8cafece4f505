"""Settings of the tests on GPUs. ``tests/verl/test_gpu_cases.py`` composes all of them on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

SMALL = (
    "verl.max_model_tokens=1024",
    "verl.max_tokens_per_device=4096",
    "verl.server_memory_share=0.3",
    "verl.sync_bucket_mb=256",
    "rollout.max_response_tokens=256",
    # Two steps must move log-probabilities clearly beyond the differences of kernels.
    "optimizer.learning_rate=2e-4",
    "optimizer.warmup_steps=0",
)
SEPARATED = ("verl.placement=separated", "verl.checkpoint_engine=nccl")
STALE = ("training.staleness_threshold=1", "training.partial_rollout=true")
# New adapters move log-probabilities less at first.
ADAPTERS = ("verl.lora.rank=16", "optimizer.learning_rate=5e-3")
NO_FLASH = ("verl.dtype=float32", "verl.attention=sdpa")


@dataclass(frozen=True)
class Case:
    """A configuration of backend ``verl``.

    Attributes:
        devices: GPUs it needs.
        shape: Shape of the model, a key of `benchmarks.gpu_models.SHAPES`.
        overrides: Settings beyond `SMALL`.
    """

    devices: int
    shape: str
    overrides: tuple[str, ...]


def devices(training: int, serving: int = 0) -> tuple[str, ...]:
    separated = (*SEPARATED, f"verl.rollout_devices_per_node={serving}") if serving else ()
    return (f"verl.devices_per_node={training}", *separated)


CASES = {
    "sleep": Case(1, "0.5b", ("verl.release_memory=true",)),
    "sleep_without_graphs": Case(1, "0.5b", ("verl.release_memory=true", "verl.cuda_graphs=false")),
    "awake": Case(1, "0.5b", ("verl.release_memory=false",)),
    "direct_send": Case(1, "untied", ("verl.release_memory=true", "verl.sync_bucket_mb=1")),
    "bfloat16": Case(1, "0.5b", ("verl.release_memory=true",)),
    "float32": Case(1, "0.5b", ("verl.release_memory=true", *NO_FLASH)),
    "no_flash": Case(1, "0.5b", ("verl.release_memory=true", "verl.attention=sdpa")),
    "entropy": Case(1, "0.5b", ("verl.max_tokens_per_device=8192", "algorithm.entropy_coefficient=0.01")),
    "separated": Case(2, "0.5b", (*devices(1, 1), *STALE)),
    "adapters": Case(1, "0.5b", ("verl.release_memory=true", *ADAPTERS)),
    "merged_adapters": Case(2, "0.5b", (*devices(1, 1), *STALE, *ADAPTERS)),
    "eight_ranks": Case(8, "0.5b", devices(8)),
    "sequence_parallel": Case(8, "untied", (*devices(8), "verl.sequence_parallel=2")),
    "tight_sync": Case(
        8,
        "7b",
        (
            *devices(4, 4),
            "verl.server_memory_share=0.85",
            "verl.sync_bucket_mb=512",
            "verl.max_tokens_per_device=16384",
            "verl.max_model_tokens=4096",
        ),
    ),
    "busy_sync": Case(8, "untied", (*devices(4, 4), *STALE, "verl.server_memory_share=0.6")),
    "experts": Case(
        8,
        "experts",
        (
            *devices(8),
            "verl.tensor_parallel=4",
            'verl.overrides={ "actor_rollout_ref.rollout.expert_parallel_size" = 4 }',
        ),
    ),
    "megatron": Case(
        8,
        "experts",
        (
            *devices(8),
            "verl.strategy=megatron",
            "verl.tensor_parallel=4",
            'verl.overrides={ "actor_rollout_ref.actor.megatron.expert_model_parallel_size" = 8 }',
        ),
    ),
}

# A whole run with what no single step shows: temperature, entropy, KL in the loss, mini-batches, offload, and resuming.
# A random model solves nothing, so entropy and KL are its only gradients.
WHOLE_RUN = (
    "training.steps=3",
    "training.groups_per_step=8",
    "training.rollouts_per_group=8",
    "training.validation_rollouts=0",
    "training.checkpoint_every_steps=1",
    "rollout.max_response_tokens=128",
    "rollout.temperature=0.7",
    "algorithm.entropy_coefficient=0.01",
    "algorithm.kl.coefficient=0.01",
    "algorithm.kl.place=loss",
    "verl.mini_batches=2",
    'verl.offload=["parameters", "optimizer"]',
    "verl.max_model_tokens=1024",
    "verl.max_tokens_per_device=8192",
    "verl.server_memory_share=0.4",
)
