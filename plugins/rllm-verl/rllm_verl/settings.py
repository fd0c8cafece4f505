"""Converts the run file to verl's configuration, which verl's workers turn into dataclasses."""

from __future__ import annotations

import difflib
import re
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm_core.config import ConfigError, RunConfig
from rllm_core.model_files import CONFIG_FILE, read_model_file
from rllm_core.run_file import foreign_keys, leaf_keys
from rllm_core.text import one_line
from rllm_verl import verl_api
from rllm_verl.config import VerlConfig
from rllm_verl.lora import model_settings
from rllm_verl.losses import VerlLoss

if TYPE_CHECKING:
    from omegaconf import DictConfig

WORKERS = "actor_rollout_ref"  # section that verl's workers and servers read
# Below WORKERS: what `_tables` sets without a setting of the run file, so that verl.overrides may change it.
OVERRIDABLE = re.compile(
    r"actor\.entropy_from_logits_with_chunking|(actor|ref)\.(fsdp_config\.)?use_torch_compile|\w+\.log_prob_max_\w+"
    r"|(actor|ref)\.fsdp_config\.(use_no_sync_for_gradient_accumulation|mixed_precision\.(buffer|reduce)_dtype)"
)
# What a setting of the run file controls, but `_tables` does not always have.
OWNED = re.compile(
    r"actor\.(clip_ratio\w*|grad_clip|optim\.grad_clip|megatron\.dtype)|model\.(lora\w*|target_modules)(\..*)?"
)
# What nothing reads, because it is for verl's trainer, its agent loop, or its own schedule of the learning rate.
UNREAD = re.compile(
    r"actor\.(calculate_entropy|data_loader_seed|ppo_epochs|ppo_micro_batch_size\w*|rollout_n|tau_\w+)"
    r"|actor\.optim\.(lr_\w+|min_lr_ratio|num_cycles|warmup_style|zero_indexed_step)"
    r"|ref\.(log_prob_micro_batch_size\w*|rollout_n)"
    r"|rollout\.(do_sample|log_prob_micro_batch_size\w*|over_sample_rate|prompt_length|response_length|top_[kp])"
    r"|(actor\.policy_loss|rollout\.(agent|multi_turn|trace|val_kwargs))(\..*)?"
)
# Keys that would break an assumption of this backend, with the reason.
REFUSED = {
    # Several turns of a conversation may be sampled at once and share their routing ID.
    "actor_rollout_ref.rollout.full_determinism": "vLLM would get the same request ID twice",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": "verl's vLLM servers do not support it",
}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}


def verl_settings(config: RunConfig) -> VerlConfig:
    """Returns the settings of ``[verl]``."""
    found: VerlConfig = config.plugins.get("verl") or VerlConfig()
    return found


def verl_config(config: RunConfig, loss: VerlLoss) -> DictConfig:
    """Composes verl's complete configuration for a run.

    Raises:
        ConfigError: If ``verl.overrides`` names an unknown key, or one that another setting of the run file controls.
    """
    from hydra import compose, initialize_config_module
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    settings = verl_settings(config)
    engine = ["model_engine=megatron"] if settings.strategy == "megatron" else []
    with initialize_config_module(verl_api.CONFIG_MODULE, version_base=None):
        base = compose(verl_api.CONFIG_NAME, overrides=engine)
    OmegaConf.set_struct(base, False)
    tables = _tables(config, settings, loss)
    merged = OmegaConf.merge(base, tables)
    assert isinstance(merged, DictConfig)
    owned = {*leaf_keys(tables[WORKERS])}
    for key, value in settings.overrides.items():
        _override(merged, key, value, owned)
    try:
        OmegaConf.resolve(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"verl.overrides cannot be combined: {one_line(error)}") from error
    return merged


def _override(merged: DictConfig, key: str, value: Any, owned: Set[str]) -> None:
    from omegaconf import DictConfig, OmegaConf

    parent, _, name = key.rpartition(".")
    siblings = OmegaConf.select(merged, parent) if parent else merged
    if not isinstance(siblings, DictConfig) or (name not in siblings and not _takes_any(parent)):
        names = [str(sibling) for sibling in siblings] if isinstance(siblings, DictConfig) else []
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {f'{parent}.{near[0]}'!r}?" if near else ""
        raise ConfigError(f"verl.overrides.{key!r}: verl's configuration has no such key{hint}")
    _check_override(key, owned)
    if isinstance(value, dict) and value and not _takes_any(parent):
        for child, content in value.items():
            _override(merged, f"{key}.{child}", content, owned)
    else:
        OmegaConf.update(merged, key, value, merge=True)


def _check_override(key: str, owned: Set[str]) -> None:
    """Checks that a key of verl's has an effect, and that no setting of the run file controls it."""
    if key in REFUSED:
        raise ConfigError(f"verl.overrides.{key!r} cannot be set with backend 'verl': {REFUSED[key]}; remove it")
    section, _, inner = key.partition(".")
    use = foreign_keys().get(key.rpartition(".")[2], {}).get("use")
    advice = f"set {' and '.join(use)} instead" if use else "remove it here"
    if OWNED.fullmatch(inner) or (inner in owned and not OVERRIDABLE.fullmatch(inner)):
        raise ConfigError(f"verl.overrides.{key!r}: another setting of the run file controls this key; {advice}")
    if section != WORKERS or UNREAD.fullmatch(inner):
        raise ConfigError(
            f"verl.overrides.{key!r} has no effect, because backend 'verl' uses verl's workers and servers, but not "
            f"its trainer; {advice}"
        )


def _takes_any(parent: str) -> bool:
    """Whether verl passes this table unchanged to another library, so that any key is valid."""
    return parent.rpartition(".")[2] in {"override_config", "override_transformer_config"} or ".engine_kwargs" in parent


def _tables(config: RunConfig, settings: VerlConfig, loss: VerlLoss) -> dict[str, Any]:
    """Returns the settings that differ from verl's defaults."""
    is_separated = settings.placement == "separated"
    releases = settings.release_memory and not is_separated
    return {
        "trainer": {
            "device": settings.device,
            "nnodes": settings.nodes,
            "n_gpus_per_node": settings.devices_per_node,
            "total_training_steps": max(1, config.training.steps),
        },
        "actor_rollout_ref": {
            "hybrid_engine": not is_separated,
            "model": {
                "path": config.model.path,
                "trust_remote_code": settings.trust_remote_code,
                "use_remove_padding": True,
                "enable_gradient_checkpointing": settings.gradient_checkpointing,
                "override_config": {"attn_implementation": settings.attention},
                **model_settings(settings),
            },
            "actor": _actor(config, settings, loss),
            "ref": _sharding(settings, forward_only=True)
            | {
                "strategy": settings.strategy,
                "log_prob_use_dynamic_bsz": True,
                "log_prob_max_token_len_per_gpu": settings.max_tokens_per_device,
                "use_torch_compile": False,
            },
            "rollout": {
                "name": "vllm",
                "mode": "async",
                "n": 1,
                "nnodes": settings.rollout_nodes if is_separated else 0,
                "n_gpus_per_node": settings.rollout_devices_per_node if is_separated else settings.devices_per_node,
                "dtype": settings.dtype,
                "temperature": config.rollout.temperature,
                "tensor_model_parallel_size": settings.tensor_parallel,
                "gpu_memory_utilization": settings.server_memory_share,
                "enforce_eager": not settings.cuda_graphs,
                "free_cache_engine": releases,
                "enable_sleep_mode": releases,
                "max_model_len": max_model_tokens(config),
                "max_num_seqs": settings.max_batch_rows,
                "max_num_batched_tokens": settings.max_batch_tokens,
                # Scale by temperature, like the trainer's log-probabilities. These are also truncated by top_k and
                # top_p, so checks.py rejects those settings.
                "logprobs_mode": "processed_logprobs",
                "calculate_log_probs": True,
                "seed": config.training.seed,
                "log_prob_use_dynamic_bsz": True,
                "log_prob_max_token_len_per_gpu": settings.max_tokens_per_device,
                "checkpoint_engine": {
                    "backend": settings.checkpoint_engine if is_separated else "naive",
                    "custom_backend_module": settings.checkpoint_engine_module or None,
                    "update_weights_bucket_megabytes": settings.sync_bucket_mb,
                },
            },
        },
    }


def _actor(config: RunConfig, settings: VerlConfig, loss: VerlLoss) -> dict[str, Any]:
    optimizer = config.optimizer
    return (
        _sharding(settings, forward_only=False)
        | loss.actor_settings()
        | {
            "strategy": settings.strategy,
            "use_dynamic_bsz": True,
            "ppo_max_token_len_per_gpu": settings.max_tokens_per_device,
            "ppo_mini_batch_size": config.training.groups_per_step * config.training.rollouts_per_group,
            "shuffle": False,
            "use_torch_compile": False,
            # Without chunks, the entropy takes 6.5 times the size of the float32 logits. See also `rllm_verl.entropy`.
            "entropy_from_logits_with_chunking": True,
            "checkpoint": {
                "save_contents": ["model", "optimizer", "extra"],
                "save_lora_only": settings.lora is not None,
            },
            "optim": {
                "lr": optimizer.learning_rate,
                "weight_decay": optimizer.weight_decay,
                "betas": [optimizer.beta1, optimizer.beta2],
                "clip_grad": optimizer.max_grad_norm,
                "total_training_steps": max(1, config.training.steps),
                "override_optimizer_config": {"eps": optimizer.epsilon},
            },
        }
        | (_megatron(config, settings) if settings.strategy == "megatron" else {})
    )


def _megatron(config: RunConfig, settings: VerlConfig) -> dict[str, Any]:
    """Returns the actor's settings under Megatron's names; the reference inherits them."""
    recomputes = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    optimizer = config.optimizer
    return {
        "megatron": {
            "dtype": settings.dtype,
            "override_transformer_config": recomputes if settings.gradient_checkpointing else {},
        },
        "optim": {
            "lr": optimizer.learning_rate,
            "weight_decay": optimizer.weight_decay,
            "clip_grad": optimizer.max_grad_norm,
            "total_training_steps": max(1, config.training.steps),
            # verl does not pass its own ``betas`` on to Megatron.
            "override_optimizer_config": {
                "adam_beta1": optimizer.beta1,
                "adam_beta2": optimizer.beta2,
                "adam_eps": optimizer.epsilon,
            },
        },
    }


def _sharding(settings: VerlConfig, *, forward_only: bool) -> dict[str, Any]:
    if settings.strategy == "megatron":
        return {}
    precision = PRECISIONS[settings.dtype]
    return {
        "fsdp_config": {
            "strategy": settings.strategy,
            "ulysses_sequence_parallel_size": settings.sequence_parallel,
            "param_offload": "parameters" in settings.offload,
            "optimizer_offload": "optimizer" in settings.offload and not forward_only,
            "use_torch_compile": False,
            # The default of verl's dataclass is True: every device would keep the whole gradient in float32.
            "use_no_sync_for_gradient_accumulation": False,
            "mixed_precision": {"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        },
        "ulysses_sequence_parallel_size": settings.sequence_parallel,
    }


def max_model_tokens(config: RunConfig) -> int:
    """Returns the maximum length of prompt plus completion: from the run file, else from the model's config.json.

    Raises:
        ConfigError: If neither has it.
    """
    settings = verl_settings(config)
    if settings.max_model_tokens is not None:
        return settings.max_model_tokens
    text = text_description(config.model.path)
    if not text:
        raise ConfigError(
            f"verl.max_model_tokens is not set, and model.path = {config.model.path!r} is not a folder on this machine "
            "with a config.json to read it from; set verl.max_model_tokens"
        )
    if "max_position_embeddings" not in text:
        raise ConfigError(
            "verl.max_model_tokens is not set, and the model's config.json has no max_position_embeddings; "
            "set verl.max_model_tokens"
        )
    return int(text["max_position_embeddings"])


def is_model_folder(path: str) -> bool:
    """Whether ``model.path`` is a model folder on this machine."""
    return (Path(path) / CONFIG_FILE).is_file()


def model_description(path: str) -> dict[str, Any]:
    """Returns the model's config.json; empty for a Hugging Face model that is not yet on this machine."""
    file: Path | None = Path(path) / CONFIG_FILE
    if not is_model_folder(path):
        file = _downloaded(path)
    return {} if file is None else read_model_file(file)


def _downloaded(name: str) -> Path | None:
    if not HUB_ID.fullmatch(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, CONFIG_FILE)
    return Path(found) if isinstance(found, str) else None


def text_description(path: str) -> dict[str, Any]:
    """Returns the part of the model's config.json about its language model; empty if unknown."""
    described = model_description(path)
    found: dict[str, Any] = described.get("text_config", described)
    return found


def has_experts(path: str) -> bool | None:
    """Whether the model is a mixture of experts; None if its config.json is not on this machine."""
    text = text_description(path)
    return any((text.get(name) or 1) > 1 for name in EXPERT_COUNTS) if text else None
