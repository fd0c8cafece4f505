"""Workloads of backend ``verl`` and verl's own ``main_ppo``: one run file, and the equivalent verl settings.

Everything that affects the computation is equal: model, prompts and their order, rollouts, lengths, server and trainer
budgets, log-probabilities recomputed before the update, loss, optimizer. `check_settings` compares the resulting
settings of both sides, key by key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.peer_environments import ROOT
from benchmarks.verl_processes import SIDE_VARIABLE
from benchmarks.workloads import WORKFLOWS, plugin_manager, training_tasks
from rllm_core import providers
from rllm_core.assembly.resolution import load_run_config
from rllm_core.config import RunConfig
from rllm_core.plugins import PluginManager
from rllm_core.types import Task


@dataclass(frozen=True)
class Shape:
    """Size of a step."""

    groups: int
    rollouts: int
    response_tokens: int


SHAPES = {"sort": Shape(16, 16, 6), "endless": Shape(8, 8, 256), "gpu": Shape(16, 16, 256)}
"""The starter task as in ``rllm-core train sort``, and completions of exactly 256 tokens (see `endless`)."""
PROMPT_TOKENS = 32
BATCH_ROWS, TRAINER_TOKENS = 256, 4096
BATCH_TOKENS = 8192
"""Large enough to keep prompts whole: on the CPU, vLLM fails to split a prompt whose request has a seed, as ours do."""
CLIP_RANGE = 0.2
# Low enough for completions, and so the work, to stay the same over time and on both sides.
LEARNING_RATE = 1e-6
WEIGHT_DECAY, BETAS, EPSILON, MAX_GRAD_NORM = 0.01, (0.9, 0.999), 1e-8, 1.0

# vLLM's engine computes itself, on both sides. A worker process would wait for a second after each call in a loop that
# keeps a core busy, and its CPU seconds would count for whatever else happens then.
EXECUTOR, ONE_PROCESS = "engine_kwargs.vllm.distributed_executor_backend", "uni"
ON_CPU: dict[str, Any] = {
    "verl.overrides": f'{{"actor_rollout_ref.rollout.{EXECUTOR}"="{ONE_PROCESS}"}}',
    "verl.device": '"cpu"',
    "verl.dtype": '"float32"',
    "verl.attention": '"sdpa"',
    "verl.release_memory": "false",
    "verl.cuda_graphs": "false",
    "verl.gradient_checkpointing": "false",
    "verl.sync_bucket_mb": 16,
    "verl.sync_tolerance": 1e-4,
    "verl.server_memory_share": 0.1,
    "verl.max_batch_rows": BATCH_ROWS,
    "verl.max_batch_tokens": BATCH_TOKENS,
    "verl.max_tokens_per_device": TRAINER_TOKENS,
    "verl.environment": json.dumps([SIDE_VARIABLE]),
}
GPU_MEMORY_SHARE, GPU_BUCKET_MB, GPU_TOKENS = 0.3, 256, 32768
ON_GPU: dict[str, Any] = {
    "verl.device": '"cuda"',
    "verl.dtype": '"bfloat16"',
    "verl.release_memory": "true",
    "verl.cuda_graphs": "true",
    "verl.gradient_checkpointing": "false",
    "verl.sync_bucket_mb": GPU_BUCKET_MB,
    "verl.server_memory_share": GPU_MEMORY_SHARE,
    "verl.max_batch_rows": BATCH_ROWS,
    "verl.max_batch_tokens": BATCH_TOKENS,
    "verl.max_tokens_per_device": GPU_TOKENS,
    "verl.environment": json.dumps([SIDE_VARIABLE]),
}
SETTINGS: dict[str, Any] = {
    "training.validation_rollouts": 0,
    "algorithm.loss": '"ppo_clip"',
    "algorithm.loss_options": f"{{clip_low = {CLIP_RANGE}, clip_high = {CLIP_RANGE}}}",
    "algorithm.aggregation": '"token_mean"',
    "algorithm.proximal_policy": '"forward"',
    "algorithm.entropy_coefficient": 0.0,
    "optimizer.learning_rate": LEARNING_RATE,
    "optimizer.schedule": '"constant"',
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": WEIGHT_DECAY,
    "optimizer.beta1": BETAS[0],
    "optimizer.beta2": BETAS[1],
    "optimizer.epsilon": EPSILON,
    "optimizer.max_grad_norm": MAX_GRAD_NORM,
}


@dataclass(frozen=True)
class Workload:
    """Workload of both sides.

    Attributes:
        name: Name of the workflow.
        model: Folder of the model.
        ray_address: Address of the shared cluster.
        steps: Number of steps.
        seed: Seed of the tasks.
        lora_rank: Rank of the adapters; 0 to train all weights.
        sync_check_every: Our ``verl.sync_check_every``; verl checks nothing.
        device: ``cpu`` or ``cuda``.
    """

    name: str
    model: str
    ray_address: str
    steps: int
    seed: int
    lora_rank: int = 0
    sync_check_every: int = 1
    device: str = "cpu"

    @property
    def shape(self) -> Shape:
        """Size of a step."""
        return SHAPES[self.name]

    @property
    def model_tokens(self) -> int:
        """Maximum tokens of a prompt and its completion."""
        return PROMPT_TOKENS + self.shape.response_tokens

    @cached_property
    def plugins(self) -> PluginManager:
        """Installed plugins, and workflow ``endless``."""
        return plugin_manager()

    @cached_property
    def config(self) -> RunConfig:
        """Our run file."""
        settings = {
            **(ON_CPU if self.device == "cpu" else ON_GPU),
            **SETTINGS,
            "verl.max_model_tokens": self.model_tokens,
            "training.groups_per_step": self.shape.groups,
            "training.rollouts_per_group": self.shape.rollouts,
            "rollout.max_response_tokens": self.shape.response_tokens,
            "model.path": f'"{self.model}"',
            "verl.ray_address": f'"{self.ray_address}"',
            "training.steps": self.steps,
            "training.seed": self.seed,
            "verl.sync_check_every": self.sync_check_every,
        }
        if self.lora_rank:
            settings |= {"verl.lora.rank": self.lora_rank, "verl.lora.alpha": self.lora_rank}
        overrides = [f"{key}={value}" for key, value in settings.items()]
        return load_run_config(
            WORKFLOWS[self.name], self.plugins, overrides=overrides, backend="verl", parser="chat_template"
        )

    @cached_property
    def tasks(self) -> Sequence[Task]:
        """Tasks of all steps, in our order."""
        workflow = self.plugins.load(self.plugins.select(providers.WorkflowProvider, WORKFLOWS[self.name]))
        return training_tasks(workflow(), self.config)


def main_ppo_settings(workload: Workload, folder: Path) -> list[str]:
    """Converts our run file to arguments of ``main_ppo``, with its files in ``folder``."""
    peer = ROOT / "benchmarks" / "verl_peer.py"
    actor = {
        "strategy": "fsdp2",
        "ppo_mini_batch_size": workload.shape.groups,
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": TRAINER_TOKENS,
        "use_kl_loss": False,
        "entropy_coeff": 0,
        "entropy_from_logits_with_chunking": True,
        "fsdp_config.entropy_from_logits_with_chunking": True,
        "clip_ratio": CLIP_RANGE,
        "clip_ratio_low": CLIP_RANGE,
        "clip_ratio_high": CLIP_RANGE,
        "loss_agg_mode": "token-mean",
        "use_torch_compile": False,
        "+checkpoint.save_lora_only": workload.lora_rank > 0,
        "fsdp_config.strategy": "fsdp2",
        "fsdp_config.use_torch_compile": False,
        "+fsdp_config.mixed_precision": "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}",
        "optim.lr": LEARNING_RATE,
        "optim.weight_decay": WEIGHT_DECAY,
        "optim.betas": f"[{BETAS[0]},{BETAS[1]}]",
        "+optim.override_optimizer_config.eps": EPSILON,
        "optim.clip_grad": MAX_GRAD_NORM,
    }
    rollout = {
        "name": "vllm",
        "n": workload.shape.rollouts,
        "tensor_model_parallel_size": 1,
        "dtype": "float32",
        "enforce_eager": True,
        "free_cache_engine": False,
        "+enable_sleep_mode": False,
        "max_model_len": workload.model_tokens,
        "max_num_seqs": BATCH_ROWS,
        "max_num_batched_tokens": BATCH_TOKENS,
        "gpu_memory_utilization": 0.1,
        "calculate_log_probs": True,
        "logprobs_mode": "processed_logprobs",
        "log_prob_use_dynamic_bsz": True,
        "log_prob_max_token_len_per_gpu": TRAINER_TOKENS,
        "agent.num_workers": 1,
        "checkpoint_engine.update_weights_bucket_megabytes": 16,
    }
    model = {
        "path": workload.model,
        "use_remove_padding": True,
        "enable_gradient_checkpointing": False,
        "+override_config.attn_implementation": "sdpa",
    }
    if workload.lora_rank:
        model |= {
            "lora_rank": workload.lora_rank,
            "lora_alpha": workload.lora_rank,
            "target_modules": "all-linear",
        }
    others = {
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": workload.steps,
        "trainer.total_epochs": 1,
        "trainer.logger": "[console]",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": folder / "checkpoints",
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "train.parquet",
        "data.train_batch_size": workload.shape.groups,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": workload.shape.response_tokens,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "data.custom_cls.path": peer,
        "data.custom_cls.name": "GatedDataset",
        "+data.turns": folder / "turns",
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": peer,
        "reward.custom_reward_function.name": "compute_score",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "+ray_kwargs.ray_init.address": workload.ray_address,
        f"+ray_kwargs.ray_init.runtime_env.env_vars.{SIDE_VARIABLE}": os.environ[SIDE_VARIABLE],
        "hydra.run.dir": folder / "hydra",
        "hydra.output_subdir": "null",
    }
    if workload.device == "cpu":
        rollout[f"+{EXECUTOR}"] = ONE_PROCESS
    else:
        actor |= {
            "ppo_max_token_len_per_gpu": GPU_TOKENS,
            "+fsdp_config.mixed_precision": "{param_dtype: bf16, reduce_dtype: fp32, buffer_dtype: fp32}",
        }
        rollout |= {
            "+enable_sleep_mode": True,
            "dtype": "bfloat16",
            "enforce_eager": False,
            "free_cache_engine": True,
            "gpu_memory_utilization": GPU_MEMORY_SHARE,
            "log_prob_max_token_len_per_gpu": GPU_TOKENS,
            "checkpoint_engine.update_weights_bucket_megabytes": GPU_BUCKET_MB,
        }
        model["+override_config.attn_implementation"] = "flash_attention_2"
        others["trainer.device"] = "cuda"
    sections = {
        "actor_rollout_ref.actor": actor,
        "actor_rollout_ref.rollout": rollout,
        "actor_rollout_ref.model": model,
    }
    nested = [
        f"{'+' if key.startswith('+') else ''}{section}.{key.removeprefix('+')}={value}"
        for section, settings in sections.items()
        for key, value in settings.items()
    ]
    return [*nested, *(f"{key}={value}" for key, value in others.items())]


MAY_DIFFER = {
    # Rows of the whole batch here, prompts there: the same number of rows.
    "actor.ppo_mini_batch_size",
    "actor.rollout_n",
    "ref.rollout_n",
    "rollout.n",
    # Every request of ours has its own limits.
    "rollout.prompt_length",
    "rollout.response_length",
    # Bound of a clipped ratio's loss, which is computed in either case.
    "actor.clip_ratio_c",
    # Ours sets the learning rate of each step itself.
    "actor.optim.total_training_steps",
    # Settings of a KL term that is not in the loss.
    "actor.kl_loss_coef",
    "actor.kl_loss_type",
    # Ours has none of these workers, and fewer of them cost less.
    "rollout.agent.num_workers",
    "rollout.seed",
}
"""Keys of verl's ``actor_rollout_ref`` that do not affect what a step computes."""
REFERENCE = "ref."
"""Neither side has a reference model."""


def check_settings(workload: Workload, arguments: Sequence[str]) -> None:
    """Compares the settings of verl's workers and servers on both sides.

    Raises:
        ValueError: If a setting differs that affects what a step computes, which would make the comparison invalid.
    """
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from rllm_verl import verl_api
    from rllm_verl.losses import VerlLoss
    from rllm_verl.settings import verl_config

    ours = verl_config(workload.config, VerlLoss(workload.config, workload.plugins))
    with initialize_config_module(verl_api.CONFIG_MODULE, version_base=None):
        theirs = compose(verl_api.CONFIG_NAME, overrides=[each for each in arguments if not each.startswith("hydra.")])
    told = [dict(_leaves(OmegaConf.to_container(each.actor_rollout_ref, resolve=True))) for each in (ours, theirs)]
    different = {
        key: values
        for key in told[0].keys() | told[1].keys()
        if not key.startswith(REFERENCE)
        and key not in MAY_DIFFER
        and (values := tuple(side.get(key) for side in told))[0] != values[1]
    }
    if different:
        raise ValueError(f"the settings of the sides differ: {different}")


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested tables by dotted key."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
