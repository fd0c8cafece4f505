"""Calculates the memory that a run of backend ``local`` needs. Imports no torch."""

from __future__ import annotations

from rllm_core.config import RunConfig
from rllm_core.memory import Device, MemoryEstimate, MemoryUse
from rllm_core.memory.transformer import BFLOAT16, BYTES, FLOAT32, Compute, TransformerShape, adam_state_bytes
from rllm_core.text import one_line
from rllm_local.config import LocalConfig

FUSED_MODEL_TYPES = ("llama", "qwen2", "qwen3")  # supported by `rllm_local.fused.FusedDecoder`
GPU_BATCH_TOKENS = 8192
CPU_BATCH_TOKENS = 4096  # larger batches exceed the caches: a small model takes 10 % longer with 8192
BATCH_TOKENS_STEP = 256
# Logits that training holds at once. On a CPU, more logits per chunk are not faster, because they exceed the caches. A
# GPU adds to the gradient of the whole head after each chunk, so few chunks are better.
CPU_CHUNK_LOGITS, GPU_CHUNK_LOGITS = 2**24, 2**27
# Float32 numbers per logit that exist at once, see `rllm_local.head`. If all logits fit in one chunk: log_softmax and
# its two gradients; for entropies also the probabilities and their products. Otherwise: a chunk's logits and their
# exponentials; under autocast also the bfloat16 numbers that they are computed from.
TRAINING_LOGITS, ENTROPY_LOGITS, CHUNKED_LOGITS = 3, 5, 2
# Logits and probabilities in float32, and their sums in float64: see `rllm_local.drawing`. With a large vocabulary,
# sampling reuses the memory of the logits.
LARGE_VOCABULARY = 2**14
SAMPLING_BYTES_PER_LOGIT = 2 * FLOAT32 + 8
# The fused decoder grows a cache by this many positions, one tensor at a time. A cache that fits in a permanent block
# doubles instead, between two such blocks; see `rllm_local.cache`.
CACHE_STEP_POSITIONS = 128
KEPT_BLOCK_BYTES = 64 * 2**20
SMALL_CACHE_COPIES = 3
CUDA_CONTEXT_BYTES = 10**9  # CUDA's context, cuBLAS and loaded kernels

TRAINING_ADVICE = (
    "lower local.max_batch_tokens, set local.gradient_checkpointing = 'on' or local.dtype = 'bfloat16', or train "
    "adapters ([local.lora])"
)
REMARKS = ("prompts in the cache, and unused parts of memory blocks",)
SAMPLING_ADVICE = "lower local.max_batch_rows, local.max_cache_gb or rollout.max_response_tokens"


def chunk_nodes(vocabulary: int, *, on_gpu: bool) -> int:
    """Returns the number of positions whose logits training holds at once."""
    return max(1, (GPU_CHUNK_LOGITS if on_gpu else CPU_CHUNK_LOGITS) // vocabulary)


def max_cache_bytes(local: LocalConfig, gpu_bytes: int | None) -> int | None:
    """Returns the maximum size of a batch's cache, including copies; None for no limit.

    Args:
        local: Section ``[local]``.
        gpu_bytes: Memory of the GPU; None on the CPU.
    """
    if local.max_cache_gb:
        return int(local.max_cache_gb * 10**9)
    return None if gpu_bytes is None else gpu_bytes // 4


def cache_copies(layers: int) -> float:
    """Returns the copies of a cache that grows one tensor at a time: the keys or values of one layer exist twice."""
    return 1 + 1 / (2 * layers)


def max_cache_positions(most_bytes: int, position_bytes: int, layers: int) -> int:
    """Returns the maximum number of positions in a cache, over all sequences and including free ones.

    Args:
        most_bytes: Maximum size of the cache, including copies.
        position_bytes: Keys and values of one position in all layers.
        layers: Number of layers.
    """
    copies = SMALL_CACHE_COPIES if most_bytes < SMALL_CACHE_COPIES * KEPT_BLOCK_BYTES else cache_copies(layers)
    return max(1, int(most_bytes / (copies * position_bytes)))


def most_batch_tokens(local: LocalConfig, *, on_gpu: bool) -> int:
    """Returns the number of positions per forward-backward pass, if memory allows."""
    most = local.max_batch_tokens or GPU_BATCH_TOKENS
    return most if on_gpu else min(most, CPU_BATCH_TOKENS)


def lowered(tokens: int) -> str:
    """Returns the note that limited memory has lowered a default."""
    return f"local.max_batch_tokens = {tokens}, because training with more does not fit in memory"


def fitting_batch_tokens(
    config: RunConfig,
    local: LocalConfig,
    shape: TransformerShape,
    model_type: str,
    *,
    on_gpu: bool,
    capacity: int,
    free: int,
) -> int:
    """Returns the positions per pass: ``local.max_batch_tokens``, or otherwise the maximum with which training fits.

    Takes the arguments of `estimate`. Returns the minimum if nothing fits, which `estimate` then reports.
    """
    most = most_batch_tokens(local, on_gpu=on_gpu)
    if local.max_batch_tokens:
        return most
    for tokens in range(most, BATCH_TOKENS_STEP, -BATCH_TOKENS_STEP):
        tried = local.model_copy(update={"max_batch_tokens": tokens})
        phases = _phases(config, tried, shape, model_type, on_gpu=on_gpu, capacity=capacity)
        if all(sum(size for _, size in parts) <= free for phase, parts in phases.items() if "training" in phase):
            return tokens
    return BATCH_TOKENS_STEP


def estimate(
    config: RunConfig,
    local: LocalConfig,
    shape: TransformerShape,
    model_type: str,
    *,
    on_gpu: bool,
    capacity: int,
    free: int | None = None,
) -> MemoryEstimate:
    """Returns the memory that a run needs on its only device.

    Args:
        config: Run file.
        local: Section ``[local]`` of the run file.
        shape: Shape of the model.
        model_type: Architecture, as in ``config.json``.
        on_gpu: Whether the device is a GPU.
        capacity: Memory of the device in bytes.
        free: Part of it not used by other processes; None for all of it.
    """
    free = capacity if free is None else free
    tokens = fitting_batch_tokens(config, local, shape, model_type, on_gpu=on_gpu, capacity=capacity, free=free)
    chosen = (lowered(tokens),) if tokens < most_batch_tokens(local, on_gpu=on_gpu) else ()
    local = local.model_copy(update={"max_batch_tokens": tokens})
    phases = _phases(config, local, shape, model_type, on_gpu=on_gpu, capacity=capacity)
    both = f"{TRAINING_ADVICE}; or {SAMPLING_ADVICE}"
    advice = {
        phase: {"training": TRAINING_ADVICE, "generation": SAMPLING_ADVICE}.get(phase, both)
        + "; or use a smaller model or a larger device"
        for phase in phases
    }
    uses = tuple(
        MemoryUse(phase=phase, what=what, size_bytes=size)
        for phase, parts in phases.items()
        for what, size in parts
        if size
    )
    device = Device(name="GPU" if on_gpu else "CPU", count=1, capacity_bytes=free, uses=uses, advice=advice)
    return MemoryEstimate(devices=(device,), chosen=chosen, remarks=REMARKS)


Parts = list[tuple[str, int]]


def _phases(
    config: RunConfig, local: LocalConfig, shape: TransformerShape, model_type: str, *, on_gpu: bool, capacity: int
) -> dict[str, Parts]:
    """Returns the parts in use in each phase of a run that trains ``local.max_batch_tokens`` positions per pass."""
    local = local.resolved(on_gpu=on_gpu)
    always = _always(config, local, shape, model_type) + ([("contexts", CUDA_CONTEXT_BYTES)] if on_gpu else [])
    training = _training(config, local, shape, on_gpu=on_gpu)
    sampling = _sampling(config, local, shape, model_type, max_cache_bytes(local, capacity if on_gpu else None))
    copies = [("weights to publish", _published_bytes(config, local, shape, model_type))]
    if local.generation == "separated":
        return {"training and generation": always + training + sampling, "weight sync": always + copies + sampling}
    return {"training": always + training, "weight sync": always + copies, "generation": always + sampling}


def _always(config: RunConfig, local: LocalConfig, shape: TransformerShape, model_type: str) -> Parts:
    """Returns the parts allocated for the whole run. Trained weights are float32, frozen ones have ``local.dtype``."""
    weights, trained = FLOAT32 * shape.parameters, shape.parameters
    if local.lora is not None:
        trained = shape.adapter_parameters(local.lora.rank, local.lora.target_modules)
        weights = BYTES[local.dtype] * shape.parameters + FLOAT32 * trained
    has_reference = config.algorithm.kl.coefficient > 0 and local.lora is None
    return [
        ("weights", weights),
        ("gradients", FLOAT32 * trained),
        ("optimizer", adam_state_bytes(trained)),
        ("copy for sampling", _copy_bytes(config, local, shape, model_type)),
        ("reference", FLOAT32 * shape.parameters if has_reference else 0),
    ]


def _copy_bytes(config: RunConfig, local: LocalConfig, shape: TransformerShape, model_type: str) -> int:
    """Returns the size of one set of weights, in the form read by the decoder of `rllm_local.model.make_decoder`."""
    shares_weights = local.generation == "colocated" and config.training.trigger_parameter_sync_step == 1
    if model_type not in FUSED_MODEL_TYPES:
        return 0 if shares_weights else FLOAT32 * shape.parameters
    size, matrix = BYTES[local.dtype], shape.vocabulary * shape.hidden
    is_fixed = shares_weights or local.lora is not None  # embedding and head cannot change while the decoder reads them
    has_dtype = local.lora is not None or local.dtype == "float32"
    matrices = 0 if is_fixed else 1
    if not (is_fixed and has_dtype) and (is_fixed or not shape.tied):
        matrices += 1
    return size * (shape.layers * shape.layer_parameters + matrices * matrix)


def _published_bytes(config: RunConfig, local: LocalConfig, shape: TransformerShape, model_type: str) -> int:
    """Returns the memory of a weight sync: the next set of weights, or one layer if nothing is sampled meanwhile.

    Joining a layer and multiplying it by the gains of norms takes, in float32, twice the size of gate and up.
    """
    if local.generation == "separated":
        return _copy_bytes(config, local, shape, model_type)
    if model_type not in FUSED_MODEL_TYPES:
        return 0
    return BYTES[local.dtype] * shape.layer_parameters + 2 * FLOAT32 * 2 * shape.intermediate * shape.hidden


def _training(config: RunConfig, local: LocalConfig, shape: TransformerShape, *, on_gpu: bool) -> Parts:
    """Returns the parts of one forward-backward pass, with the gradient of the largest weight before it is added."""
    tokens = max(local.max_batch_tokens, config.rollout.max_response_tokens)
    steps = config.training.steps
    has_entropy = max(config.algorithm.entropy_coefficient_at(step, steps) for step in (1, max(1, steps))) > 0
    checkpointing, trained, compute = local.gradient_checkpointing == "on", shape.parameters, _compute(local)
    extra = FLOAT32 * shape.largest_parameters
    if local.lora is not None:
        trained = shape.adapter_parameters(local.lora.rank, local.lora.target_modules)
        extra = shape.adapter_activation_bytes(tokens, compute, checkpointing=checkpointing)
    copies = BFLOAT16 * trained if local.dtype == "bfloat16" else 0
    activations = shape.activation_bytes(tokens, compute, checkpointing=checkpointing)
    per_logit = FLOAT32 * (ENTROPY_LOGITS if has_entropy else TRAINING_LOGITS)
    chunk = chunk_nodes(shape.vocabulary, on_gpu=on_gpu)
    if tokens > chunk:
        per_logit = FLOAT32 * CHUNKED_LOGITS + (BFLOAT16 if local.dtype == "bfloat16" else 0)
    return [
        ("logits", shape.logits_bytes(min(tokens, chunk), per_logit)),
        ("activations", activations + extra),
        ("bfloat16 copies", copies),
    ]


def _compute(local: LocalConfig) -> Compute:
    """Returns the precision of a pass; frozen bfloat16 weights also make the sums over layers bfloat16."""
    if local.dtype == "float32":
        return "float32"
    return "autocast" if local.lora is None else "bfloat16"


def _sampling(
    config: RunConfig, local: LocalConfig, shape: TransformerShape, model_type: str, most: int | None
) -> Parts:
    training = config.training
    at_once = max(config.window_quota * training.rollouts_per_group, training.validation_rollouts)
    rows = min(local.max_batch_rows, config.rollout.max_concurrent_rollouts, at_once)
    per_logit = SAMPLING_BYTES_PER_LOGIT
    if shape.vocabulary >= LARGE_VOCABULARY:
        per_logit = FLOAT32 + (0 if local.dtype == "float32" else BFLOAT16)
    # Transformers rotates keys in the precision of the weights.
    is_fused = model_type in FUSED_MODEL_TYPES
    size = BYTES[local.dtype] if is_fused or local.lora is not None else FLOAT32
    used = shape.cache_bytes(rows * config.rollout.max_response_tokens, size)
    grown = shape.cache_bytes(rows * (config.rollout.max_response_tokens + CACHE_STEP_POSITIONS), size)
    cache = int((grown if is_fused else used) * cache_copies(shape.layers))
    if is_fused:
        cache = max(cache, min(SMALL_CACHE_COPIES * used, 2 * KEPT_BLOCK_BYTES))
    return [
        ("cache", cache if most is None else min(cache, most)),
        ("logits", shape.logits_bytes(rows, per_logit)),
    ]


def advice(error: BaseException, *, training: bool) -> str | None:
    """Returns advice after torch failed to allocate memory; None for any other error.

    Args:
        error: Torch's error. On the CPU, its allocator raises a RuntimeError.
        training: Whether training failed, rather than sampling.
    """
    text = str(error)
    if type(error).__name__ != "OutOfMemoryError" and "DefaultCPUAllocator" not in text:
        return None
    return f"out of memory; {TRAINING_ADVICE if training else SAMPLING_ADVICE} (torch: {one_line(error)})"
