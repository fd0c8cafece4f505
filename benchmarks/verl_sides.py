"""Backend ``verl`` and verl's own ``main_ppo``, each in a process that waits between steps (see `sides`).

``ours`` is ``rllm-core train sort --backend verl``; ``main_ppo`` is ``python -m verl.trainer.main_ppo``, unedited, with
the same tasks in the same order and the same reward (`benchmarks.verl_peer`), one worker for its agent loops and one
for rewards, since more of them only add processes here. Everything that decides what is computed is equal: model,
prompts, rollouts, lengths, budgets of servers and trainer, log-probabilities computed again before the update, loss,
optimizer. Neither validates or saves between steps.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from rllm_renderers.chat_template import ChatTemplateParser
from rllm_workflows.sort import SortWorkflow, prompt

from benchmarks.core_side import train_gated
from benchmarks.environments import ROOT
from benchmarks.sides import Gate, SideError, serve
from benchmarks.trials import Row
from benchmarks.verl_processes import SIDE_VARIABLE
from benchmarks.workloads import training_tasks
from rllm_core.config import RunConfig, load_run_config
from rllm_core.plugins import PluginManager
from rllm_core.types import Task

GROUPS, ROLLOUTS = 16, 16
"""As ``rllm-core train sort`` has them."""
MODEL_TOKENS, BATCH_ROWS, BATCH_TOKENS, TRAINER_TOKENS = 64, 256, 2048, 4096
PROMPT_TOKENS, RESPONSE_TOKENS = 32, 6
CLIP_RANGE = 0.2
# So low that what is sampled, and so what has to be computed, is the same all along and on both sides.
LEARNING_RATE = 1e-6
WEIGHT_DECAY, BETAS, EPSILON, MAX_GRAD_NORM = 0.01, (0.9, 0.999), 1e-8, 1.0
START_SECONDS = 300.0
PROMPTS_COMPARED = 16

ON_CPU: dict[str, Any] = {
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
SETTINGS: dict[str, Any] = {
    **ON_CPU,
    "verl.max_model_tokens": MODEL_TOKENS,
    "training.groups_per_step": GROUPS,
    "training.rollouts_per_group": ROLLOUTS,
    "training.validation_rollouts": 0,
    "rollout.max_response_tokens": RESPONSE_TOKENS,
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
    """What both sides train on.

    Attributes:
        model: The folder.
        ray_address: The cluster that both join.
        steps: How many.
        seed: Of tasks.
    """

    model: str
    ray_address: str
    steps: int
    seed: int

    @cached_property
    def plugins(self) -> PluginManager:
        """What is installed."""
        return PluginManager.from_environment()

    @cached_property
    def config(self) -> RunConfig:
        """Our run file."""
        settings = {
            **SETTINGS,
            "model.path": f'"{self.model}"',
            "verl.ray_address": f'"{self.ray_address}"',
            "training.steps": self.steps,
            "training.seed": self.seed,
        }
        overrides = [f"{key}={value}" for key, value in settings.items()]
        return load_run_config("sort", self.plugins, overrides=overrides, backend="verl", parser="chat_template")

    @cached_property
    def tasks(self) -> Sequence[Task]:
        """Of all steps, in the order in which ours visits them."""
        return training_tasks(SortWorkflow(), self.config)


def messages_of(task: Task) -> list[dict[str, str]]:
    """What the workflow asks with."""
    return [{"role": "user", "content": prompt(task.data["word"])}]


# --------------------------------------------------------------------------------------------------------------------
# main_ppo


def train_main_ppo(workload: Workload, gate: Gate) -> Row:
    """Verl's own loop; this process only hands its turns on."""
    _check_prompts(workload)
    with tempfile.TemporaryDirectory(prefix="turns-") as temporary:
        folder = Path(temporary)
        _write_dataset(workload.tasks, folder / "train.parquet")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(folder / "turns"))
            listening.listen()
            command = [sys.executable, "-m", "verl.trainer.main_ppo", *_settings(workload, folder)]
            with _running(command) as process, _connected(listening, process) as turns:
                for line in turns:
                    step = int(line)
                    if step:
                        gate.step_ended(step)
                    else:
                        gate.open_first()
                    turns.write("go\n")
                    turns.flush()
                if process.wait(START_SECONDS):
                    raise SideError(f"main_ppo ended with exit code {process.returncode}")
    return {}


def _check_prompts(workload: Workload) -> None:
    """Both sides must read the same tokens, or the comparison is void."""
    from transformers import AutoTokenizer

    tokenizer, parser = (
        AutoTokenizer.from_pretrained(workload.model),
        ChatTemplateParser.from_model(workload.model),
    )
    if list(parser.get_stop_token_ids()) != [tokenizer.eos_token_id]:
        raise ValueError("the sides end a turn with different tokens")
    for task in workload.tasks[:PROMPTS_COMPARED]:
        theirs = tokenizer.apply_chat_template(messages_of(task), add_generation_prompt=True, return_dict=False)
        if theirs != list(parser.render(messages_of(task))):
            raise ValueError(f"the sides tokenise {messages_of(task)} differently")


def _write_dataset(tasks: Sequence[Task], file: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(
        [
            {
                "data_source": "sort",
                "prompt": messages_of(task),
                "reward_model": {"style": "rule", "ground_truth": task.data["answer"]},
                "extra_info": {"index": index},
            }
            for index, task in enumerate(tasks)
        ]
    ).to_parquet(str(file))


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextmanager
def _connected(listening: socket.socket, process: subprocess.Popen[bytes]) -> Iterator[IO[str]]:
    """The dataset's end, once main_ppo has started everything."""
    listening.settimeout(1.0)
    for _ in range(int(START_SECONDS)):
        if process.poll() is not None:
            raise SideError(f"main_ppo ended with exit code {process.returncode} before its first step")
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        connection.settimeout(None)
        with connection, connection.makefile("rw", encoding="utf-8") as turns:
            yield turns
            return
    raise SideError(f"main_ppo did not begin within {START_SECONDS:g} s")


def _settings(workload: Workload, folder: Path) -> list[str]:
    """Our run file in verl's terms."""
    peer = ROOT / "benchmarks" / "verl_peer.py"
    actor = {
        "strategy": "fsdp2",
        "ppo_mini_batch_size": GROUPS,
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": TRAINER_TOKENS,
        "use_kl_loss": False,
        "entropy_coeff": 0,
        "clip_ratio": CLIP_RANGE,
        "clip_ratio_low": CLIP_RANGE,
        "clip_ratio_high": CLIP_RANGE,
        "loss_agg_mode": "token-mean",
        "use_torch_compile": False,
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
        "n": ROLLOUTS,
        "tensor_model_parallel_size": 1,
        "dtype": "float32",
        "enforce_eager": True,
        "free_cache_engine": False,
        "+enable_sleep_mode": False,
        "max_model_len": MODEL_TOKENS,
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
        "data.train_batch_size": GROUPS,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": RESPONSE_TOKENS,
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


# --------------------------------------------------------------------------------------------------------------------
# Both


def train_ours(workload: Workload, gate: Gate) -> Row:
    """``rllm-core train``."""
    return train_gated(workload.config, workload.plugins, gate)


SIDES = {"ours": train_ours, "main_ppo": train_main_ppo}


def train(request: Row, gate: Gate) -> Row:
    """Train one side; the request is its name and the fields of `Workload`."""
    name = request.pop("side")
    return SIDES[name](Workload(**request), gate)


if __name__ == "__main__":
    serve(train)
