"""Model loading and process-wide torch settings."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from rllm_core.errors import ConfigError
from rllm_core.model_files import check_weights, random_weights
from rllm_local import attention, memory
from rllm_local.config import LocalConfig, LoRAConfig
from rllm_local.decoders import Decoder, TransformersDecoder
from rllm_local.fused import FusedDecoder
from rllm_local.graph_decoder import GraphDecoder
from rllm_local.kernel_decoder import KernelDecoder
from rllm_local.vision import ImageSource

logger = logging.getLogger(__name__)

SMALL_MODEL_PARAMETERS = 5_000_000
EXACT_ERROR = 1e-5
ALIGNMENT_BYTES = 64  # of memory that torch allocates

_model_lock = threading.RLock()


@dataclass(frozen=True)
class TorchSettings:
    """Process-wide settings. Thread counts apply to the calling thread and later ones, so the worker sets them."""

    threads: int
    matmul_precision: str
    cudnn_attention: bool

    @classmethod
    def current(cls) -> TorchSettings:
        """Returns the current settings."""
        cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        return cls(torch.get_num_threads(), torch.get_float32_matmul_precision(), cudnn_attention)

    def apply(self) -> None:
        """Applies these settings."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.backends.cuda.enable_cudnn_sdp(self.cudnn_attention)


def runs_on_gpu(config: LocalConfig) -> bool:
    """Returns whether a run uses a GPU, or would use one if the machine had one."""
    return config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())


def compute_dtype(config: LocalConfig) -> torch.dtype:
    """Returns the precision of the forward passes."""
    dtype: torch.dtype = getattr(torch, config.resolved(on_gpu=runs_on_gpu(config)).dtype)
    return dtype


def autocast_dtype(config: LocalConfig) -> torch.dtype | None:
    """Returns the precision of torch's autocast; None if forward passes have the precision of the trained weights."""
    dtype = compute_dtype(config)
    return dtype if dtype == torch.bfloat16 else None


def device_of(config: LocalConfig) -> torch.device:
    """Returns the device of a run.

    Raises:
        ConfigError: If the device does not exist.
    """
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"local.device = {config.device!r}, but torch finds no GPU here; use 'cpu' or 'auto'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"local.device = {config.device!r}, but there are {torch.cuda.device_count()} GPUs")
    return device


def load_model(path: str | Path, config: LocalConfig) -> PreTrainedModel:
    """Loads a causal or vision-language model for training, with adapters if configured.

    The model stays in evaluation mode: with dropout, the trained policy would differ from the sampled one. Trained
    weights are float32; frozen weights have the configured dtype.

    Raises:
        ConfigError: If transformers cannot load the model, or its files lack weights or have some that are no numbers.
    """
    device = device_of(config)
    frozen = config.lora is not None
    dtype = compute_dtype(config) if frozen else torch.float32
    kind = "causal language"
    model: PreTrainedModel
    try:
        model_config = AutoConfig.from_pretrained(str(path), trust_remote_code=config.trust_remote_code)
        if reads_images(model_config):
            kind = "vision-language"
        with one_model_at_a_time():
            model, loaded = _auto_class(model_config).from_pretrained(
                str(path),
                dtype=dtype,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # rejected below, in one line
            )
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.path = {str(path)!r} cannot be loaded as a {kind} model: {reason}") from error
    model.to(device)  # type: ignore[arg-type]
    _check_weights(model, str(path), loaded)
    # Weights lie anywhere in the file that they are read from. Products of equal numbers at another alignment can
    # differ in their last bits, as those of a model and of its copy in an engine.
    for weight in model.parameters():
        if weight.data_ptr() % ALIGNMENT_BYTES:
            weight.data = weight.data.clone()
    if config.lora is not None:
        _add_adapters(model, config.lora)
    model.train(False)
    return model


def _check_weights(model: PreTrainedModel, path: str, loaded: dict[str, Any]) -> None:
    """Rejects weights that transformers drew at random, of which it only warns, and weights that are not finite."""
    weights = dict(model.named_parameters())
    check_weights(path, random_weights(weights, loaded))
    for name, weight in weights.items():
        if weight.itemsize > 1 and not weight.detach().sum().isfinite():  # torch cannot sum 8-bit numbers
            raise ConfigError(f"model.path = {path!r}: {name} has NaN or infinite values; use another model")


def reads_images(config: Any) -> bool:
    """Returns whether a configuration belongs to a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def _auto_class(config: Any) -> Any:
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def _add_adapters(model: PreTrainedModel, lora: LoRAConfig) -> None:
    """Adds adapters to the model's linear layers and freezes everything else."""
    from peft import LoraConfig, TaskType

    _check_targets(model, lora)
    targets: Any = list(lora.target_modules) or "all-linear"
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    special = [name for name, module in linear if not _computes_a_product(module)]
    settings = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=targets,
        exclude_modules=None if lora.target_modules else special or None,
        lora_dropout=0.0,
    )
    try:
        # peft warns that adapters of a tied head cannot be merged; `export-model` can. It also warns that it ignores
        # the rank of stacked experts, and uses it.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            warnings.filterwarnings("ignore", r"The following \w+_pattern keys", RuntimeWarning)
            model.add_adapter(settings)
    except ValueError as error:
        raise ConfigError(f"local.lora: {str(error).splitlines()[0]}") from error
    for adapter in trained_parameters(model).values():  # they get the precision of the frozen weights
        adapter.data = adapter.data.float()


def check_adapters(path: str | Path, config: LocalConfig) -> None:
    """Checks the names of the layers that get adapters, without loading the model's weights.

    Raises:
        ConfigError: If the model has no such layer.
    """
    if config.lora is None or not config.lora.target_modules:
        return
    try:
        described = AutoConfig.from_pretrained(str(path), trust_remote_code=config.trust_remote_code)
        with torch.device("meta"):
            model = _auto_class(described).from_config(described, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError):
        return  # loading the model says what is wrong with it
    _check_targets(model, config.lora)


def _check_targets(model: torch.nn.Module, lora: LoRAConfig) -> None:
    """Rejects names without a layer, which peft ignores if another name has one."""
    layers = dict(model.named_modules())
    if any(name.endswith(".experts") for name in layers):
        return  # peft knows the layers of stacked experts by other names
    unknown = [each for each in lora.target_modules if not any(f".{name}".endswith(f".{each}") for name in layers)]
    if unknown:
        linear = {name.rpartition(".")[2] for name, layer in layers.items() if isinstance(layer, torch.nn.Linear)}
        raise ConfigError(
            f"local.lora.target_modules: the model has no layer {', '.join(map(repr, unknown))}; its linear layers "
            f"are {', '.join(sorted(linear))}"
        )


@torch.no_grad()
def _computes_a_product(module: torch.nn.Linear) -> bool:
    """Whether a linear layer returns what its name promises; Llama 4's router, for one, returns a tuple."""
    if type(module).forward is torch.nn.Linear.forward:
        return True
    try:
        found: Any = module(module.weight.new_zeros(2, module.in_features))
    except RuntimeError:  # it reads inputs of another shape, as the grouped layers of DeepSeek V4
        return False
    return isinstance(found, torch.Tensor) and found.shape == (2, module.out_features)


def settings_for(model: PreTrainedModel, config: LocalConfig) -> TorchSettings:
    """Returns threads, matmul precision and attention for a model.

    Small models run on one thread: their operations are too short to be worth sharing, and a second thread that waits
    for a busy core slows them down. Concurrent workers divide the threads between them.

    The precision ``medium`` lets oneDNN compute float32 products. On some CPUs this is up to twice as fast for large
    products. But it generates code before the first product of any shape, which takes small models longer than it
    saves. Other CPUs round to bfloat16, which the probe detects. The choice depends on the model and the CPU, never on
    timing. On a GPU, ``high`` computes float32 products with TF32.

    cuDNN plans its attention again for every new shape, which takes up to a second, and each token to sample and each
    batch to train has a new one. torch prefers cuDNN on some GPUs, so it is switched off.
    """
    small = model.num_parameters() < SMALL_MODEL_PARAMETERS
    workers = 2 if config.generation == "separated" else 1
    threads = config.threads or (1 if small else max(1, torch.get_num_threads() // workers))
    precision = config.matmul_precision
    if precision == "auto" and model.device.type == "cuda":
        precision = "high"
    elif precision == "auto":
        exact = model.device.type == "cpu" and not small and is_exact("medium")
        precision = "medium" if exact else "highest"
    return TorchSettings(threads, precision, cudnn_attention=False)


def is_exact(precision: str) -> bool:
    """Returns whether this CPU computes float32 products of this precision in float32; some round to bfloat16."""
    generator, before = torch.Generator().manual_seed(0), torch.get_float32_matmul_precision()
    left, right = (torch.randn(256, 256, generator=generator) for _ in range(2))
    torch.set_float32_matmul_precision(precision)
    try:
        product = left @ right
    finally:
        torch.set_float32_matmul_precision(before)
    exact = left.double() @ right.double()
    return float((product - exact).abs().max() / exact.abs().max()) < EXACT_ERROR


def use_matching_attention(model: PreTrainedModel, precision: str) -> None:
    """Replaces torch's fused attention on the CPU if another implementation is faster.

    With ``medium``, fused attention is ten times slower. Small models can afford the memory of `rllm_local.attention`.
    """
    if model.device.type != "cpu":
        return
    if precision != "highest":
        model.set_attn_implementation("eager")
    elif model.config._attn_implementation == "sdpa" and model.num_parameters() < SMALL_MODEL_PARAMETERS:
        attention.register()
        # Vision towers use bidirectional attention.
        model.set_attn_implementation({"text_config": attention.NAME} if reads_images(model.config) else attention.NAME)


def recompute_layers(model: PreTrainedModel) -> None:
    """Makes layers keep only their inputs for the backward pass.

    Transformers' own gradient checkpointing needs training mode, which would turn dropout on.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **options)
    return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **options)


def make_decoder(
    model: PreTrainedModel, config: LocalConfig, *, shares_weights: bool, images: ImageSource | None = None
) -> Decoder:
    """Returns the fused decoder if its numbers agree with transformers' on this model, else transformers' decoder.

    Args:
        model: Model in training.
        config: Settings of the backend.
        shares_weights: Whether the decoder may run ``model`` itself instead of a copy: nothing is sampled during
            training, and every optimizer step goes live at once.
        images: Source of images; None for text only.

    Raises:
        ConfigError: If transformers' decoder is needed, and disagrees with a forward pass without its cache.
    """
    dtype, of_training = compute_dtype(config), autocast_dtype(config)
    if FusedDecoder.supports(model):
        kinds: list[type[FusedDecoder]] = [FusedDecoder]
        if model.device.type == "cuda":
            kinds.insert(0, GraphDecoder)
        elif KernelDecoder.supports(model, dtype):
            kinds.insert(0, KernelDecoder)
        for kind in kinds:
            fused = kind(model, dtype, shares_weights=shares_weights)
            with torch.inference_mode():
                reference = TransformersDecoder(model, shared=True, autocast_dtype=of_training)
                if fused.agrees_with(reference, vocabulary_size(model)):
                    return fused
            logger.warning(f"the {kind.title} disagrees with transformers on this model, so it is not used")
    decoder = TransformersDecoder(model, shared=shares_weights, images=images, autocast_dtype=of_training)
    is_exact = (dtype == torch.float32 or config.lora is None) and config.matmul_precision in ("auto", "highest")
    probes = {decoder: is_exact and of_training is None}
    if is_exact and of_training is not None:  # rounding to bfloat16 hides small differences
        probes[TransformersDecoder(model, shared=True)] = True
    if not all(each.agrees_with_itself(vocabulary_size(model), is_exact=exact) for each, exact in probes.items()):
        raise ConfigError(
            f"model.path: backend local cannot sample from models of type {model.config.model_type!r}, because "
            "transformers computes other logits for them with padding or a cache; use a model with attention"
        )
    return decoder


def max_cache_positions(model: PreTrainedModel, config: LocalConfig) -> int | None:
    """Returns the maximum number of positions in a batch's cache, used or free; None for no limit."""
    gpu_bytes = torch.cuda.get_device_properties(model.device).total_memory if model.device.type == "cuda" else None
    most = memory.max_cache_bytes(config, gpu_bytes)
    if most is None:
        return None
    layers = attention_shapes(model)
    position_bytes = 2 * sum(layer.kv_heads * layer.head_dim for layer in layers) * compute_dtype(config).itemsize
    return memory.max_cache_positions(most, position_bytes, len(layers))


class AttentionShape(NamedTuple):
    """Heads of a layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int


def attention_shapes(model: PreTrainedModel) -> list[AttentionShape]:
    """Returns the attention of each layer; the layers of Gemma 4 differ."""
    text: Any = model.config.get_text_config()
    shapes: list[AttentionShape] = []
    for index in range(text.num_hidden_layers):
        layer = text.per_layer_config[index] if getattr(text, "is_heterogeneous", False) else text
        heads: int = layer.num_attention_heads
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        shapes.append(AttentionShape(heads, getattr(layer, "num_key_value_heads", None) or heads, head_dim))
    return shapes


def trained_parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters that are trained: all, or those of the adapters."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def vocabulary_size(model: PreTrainedModel) -> int:
    """Returns the number of ids that the model can read; its tokenizer may know fewer."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


@contextmanager
def one_model_at_a_time() -> Iterator[None]:
    """Lets one thread create, load or save a model, for runs in several threads of a process.

    Meanwhile, transformers switches off how torch initializes weights, and others seed torch, for all threads. Also
    silences transformers' progress bars, which would break the run's display.
    """
    with _model_lock:
        was_enabled = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if was_enabled:
                transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
