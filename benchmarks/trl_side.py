"""TRL's side of a comparison: its ``GRPOTrainer``, set up from the core's run file.

Everything that affects the computation is equal: model folder, chat template, tasks and their order, batch, lengths,
sampling, advantages (group mean and standard deviation), one update per batch, token-mean loss, AdamW, float32. TRL's
additional work, such as logging the entropy, is left in. TRL generates with transformers, logs every 10 steps, and
saves nothing during training. On a GPU, it computes in bfloat16, and generates with vLLM in its own process, or with
transformers where it is asked to.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import torch
from datasets import Dataset
from rllm_workflows import sort
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks import endless
from benchmarks.real_vocabulary import peak_mb
from benchmarks.sides import Gate, serve
from benchmarks.trials import Row
from benchmarks.workloads import WORKFLOWS, plugin_manager, prompt_of, run_config, training_tasks
from rllm_core import providers
from rllm_core.config import RunConfig
from rllm_core.parser import BaseParser
from rllm_core.plugins import PluginManager

PROMPTS_COMPARED = 16


class _Gated(TrainerCallback):  # type: ignore[misc]
    """Waits at the gate between steps."""

    def __init__(self, gate: Gate, rewards: _Rewards) -> None:
        self._gate = gate
        self._rewards = rewards

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._gate.open_first()

    def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
        self._gate.step_ended(
            state.global_step,
            sampled_tokens=self._rewards.sampled_tokens,
            reward_mean=self._rewards.reward_mean,
            peak_mb=peak_mb(),
        )


class _Rewards:
    """The workflow's own grader as a TRL reward function."""

    __name__ = "checker"

    def __init__(self, workload: str, stop_token_id: int) -> None:
        self._workload = workload
        self._stop_token_id = stop_token_id
        self.sampled_tokens = 0
        self.reward_mean = 0.0

    def __call__(self, completions: Any, completion_ids: Any, task: list[str], **_: Any) -> list[float]:
        rewards = [
            self._reward(json.loads(data), completion[0]["content"], ids[-1] != self._stop_token_id)
            for data, completion, ids in zip(task, completions, completion_ids, strict=True)
        ]
        self.sampled_tokens = sum(map(len, completion_ids))
        self.reward_mean = sum(rewards) / len(rewards)
        return rewards

    def _reward(self, data: dict[str, Any], text: str, is_cut_off: bool) -> float:
        if WORKFLOWS[self._workload] == "endless":
            return endless.even_share(text)
        return 0.0 if is_cut_off else sort.score(text.strip(), data["answer"])


SAMPLERS: dict[str, dict[str, Any]] = {
    "transformers": {"use_vllm": False},
    "vllm": {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": 1024,
    },
}
ON_DEVICE: dict[str, dict[str, Any]] = {
    "cpu": {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False},
    "cuda": {"use_cpu": False, "bf16": True},
}
MAX_GPU_ROWS = 64
"""Sequences per pass on a GPU. TRL keeps the logits of all their tokens several times: over 100 GB for 256."""


def grpo_config(config: RunConfig, folder: str, device: str = "cpu", sampler: str = "transformers") -> GRPOConfig:
    """Converts the run file to TRL's configuration; ``sampler`` is a key of `SAMPLERS`."""
    training, optimizer, rollout = config.training, config.optimizer, config.rollout
    sequences = training.groups_per_step * training.rollouts_per_group
    passes = -(-sequences // MAX_GPU_ROWS) if device == "cuda" else 1
    return GRPOConfig(
        output_dir=folder,
        seed=training.seed,
        max_steps=training.steps,
        per_device_train_batch_size=sequences // passes,
        gradient_accumulation_steps=passes,
        num_generations=training.rollouts_per_group,
        num_iterations=1,
        shuffle_dataset=False,
        max_completion_length=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=optimizer.learning_rate,
        lr_scheduler_type=optimizer.schedule,
        warmup_steps=optimizer.warmup_steps,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        fp16=False,
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **ON_DEVICE[device],
        **SAMPLERS[sampler],
    )


def check_prompts(tokenizer: Any, parser: BaseParser, prompts: list[list[dict[str, str]]]) -> None:
    """Checks that both sides read the same tokens; otherwise the comparison would be invalid.

    Raises:
        ValueError: If the tokens differ.
    """
    for messages in prompts:
        theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        if theirs != parser.render(messages):
            raise ValueError(f"the sides tokenize {messages} differently: {theirs} and {parser.render(messages)}")


def train(request: Row, gate: Gate) -> Row:
    """Trains one run and saves the model to ``request["save_to"]``; other keys as in `benchmarks.core_side.train`."""
    torch.set_num_threads(1)
    plugins = plugin_manager()
    device = request.get("device", "cpu")
    config = run_config(
        plugins,
        request["workload"],
        model=request["model"],
        seed=request["seed"],
        steps=request["steps"],
        device=device,
    )
    workload = WORKFLOWS[request["workload"]]
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    tasks = training_tasks(_load(plugins, providers.WorkflowProvider, workload)(), config)
    prompts = [prompt_of(workload, task) for task in tasks]
    parser: type[BaseParser] = _load(plugins, providers.ParserProvider, config.parser)
    check_prompts(tokenizer, parser.from_model(request["model"]), prompts[:PROMPTS_COMPARED])
    rewards = _Rewards(workload, tokenizer.eos_token_id)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32),
            args=grpo_config(config, folder, device, request.get("sampler", "transformers")),
            reward_funcs=rewards,
            train_dataset=Dataset.from_list(
                [
                    {"prompt": prompt, "task": json.dumps(task.data, default=dict)}
                    for prompt, task in zip(prompts, tasks, strict=True)
                ]
            ),
            processing_class=tokenizer,
            callbacks=[_Gated(gate, rewards)],
        )
        trainer.train()
        if "save_to" in request:
            trainer.save_model(request["save_to"])
    return {"saved_to": request.get("save_to")}


def _load(plugins: PluginManager, kind: type[Any], name: str) -> Any:
    return plugins.load(plugins.select(kind, name))


if __name__ == "__main__":
    serve(train)
