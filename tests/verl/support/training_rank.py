"""One rank of a verl ``TrainingWorker`` outside Ray: ``python training_rank.py MODEL_FOLDER OUTPUT_FOLDER``.

Reads its rank from the environment, as torch.distributed does. Scores a batch, updates on it, saves, updates again,
loads, and repeats the same updates. With ``TEST_LORA_RANK``, it trains adapters of that rank. Every rank writes its
results to ``rank<N>.json``; rank 0 also writes the weights.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rllm_verl.adapter_weights import merged
from safetensors.torch import save_file
from verl import DataProto
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

ROWS, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 8, 12
ADVANTAGES = (1.0, -1.0, 0.5, -0.5)
UPDATES_AFTER_CHECKPOINT = 2
LORA_RANK = "TEST_LORA_RANK"


def batch(vocab_size: int) -> dict[str, torch.Tensor]:
    """Rows ``(batch, tokens)`` with left and right padding; one has environment tokens within its response."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, vocab_size, (ROWS, PROMPT_TOKENS + RESPONSE_TOKENS), generator=generator)
    attention = torch.ones_like(tokens)
    attention[0, :3] = attention[1, -4:] = attention[2, :5] = attention[2, -2:] = 0
    response_mask = attention[:, PROMPT_TOKENS:].clone()
    response_mask[3, 4:7] = 0
    return {
        "prompts": tokens[:, :PROMPT_TOKENS],
        "responses": tokens[:, PROMPT_TOKENS:],
        "input_ids": tokens,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "response_mask": response_mask,
        "advantages": torch.tensor(ADVANTAGES)[:, None] * response_mask,
    }


def training_worker(model: str, lora_rank: int) -> TrainingWorker:
    """A policy in fp32 under FSDP2, on the ranks set in the environment; with adapters if they have a rank."""
    optimizer = FSDPOptimizerConfig(lr=1e-4, total_training_steps=10)
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        use_dynamic_bsz=True,
        max_token_len_per_gpu=64,
        infer_max_token_len_per_gpu=64,
        use_torch_compile=False,
        use_remove_padding=True,
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )
    contents = ["model", "optimizer", "extra"]
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=model,
                use_remove_padding=True,
                override_config={"attn_implementation": "sdpa"},
                enable_gradient_checkpointing=False,
                lora_rank=lora_rank,
            ),
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(save_contents=contents, load_contents=contents),
        )
    )
    worker.reset()
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=ROWS,
        use_dynamic_bsz=True,
        ppo_max_token_len_per_gpu=64,
        optim=optimizer,
        fsdp_config=engine,
        loss_agg_mode="token-mean",
    )
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


class Rank:
    """This rank's rows, prepared as a worker group would."""

    def __init__(self, model: str) -> None:
        self.has_adapters = LORA_RANK in os.environ
        torch.manual_seed(0)  # of new adapters
        self.worker = training_worker(model, int(os.environ.get(LORA_RANK, "0")))
        self.ranks = torch.distributed.get_world_size()
        rows = batch(self.worker.model_config.hf_config.vocab_size)
        share = ROWS // self.ranks
        first = torch.distributed.get_rank() * share
        self.data = DataProto.from_dict(tensors={name: row[first : first + share] for name, row in rows.items()})

    def logprobs(self) -> torch.Tensor:
        """``(rows of this rank, response_tokens)``."""
        rows = left_right_2_no_padding(self.data.to_tensordict())
        tu.assign_non_tensor(rows, calculate_entropy=False, compute_loss=False, temperature=1.0)
        output = self.worker.infer_batch(rows)
        return no_padding_2_padding(tu.get(output, "log_probs"), rows).float()

    def update(self) -> dict[str, float]:
        """Takes one optimizer step on the whole batch."""
        rows = left_right_2_no_padding(self.data.to_tensordict())
        tu.assign_non_tensor(
            rows,
            calculate_entropy=False,
            global_batch_size=ROWS,
            mini_batch_size=ROWS,
            epochs=1,
            seed=0,
            dataloader_kwargs={"shuffle": False},
            temperature=1.0,
        )
        metrics = tu.get(self.worker.train_mini_batch(rows), "metrics")
        return {name: metrics[name][0] for name in ("loss", "grad_norm")}

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights, gathered from the ranks and with adapters merged in."""
        if self.has_adapters:
            return dict(merged(self.worker.engine.module, "cpu"))
        weights, _ = self.worker.engine.get_per_tensor_param()
        return {name: weight.detach().clone().contiguous() for name, weight in weights}


def main() -> None:
    model, output = sys.argv[1], Path(sys.argv[2])
    rank = Rank(model)
    report: dict[str, Any] = {}
    weights: dict[str, dict[str, torch.Tensor]] = {}

    before = rank.logprobs()
    report["logprobs"] = before.tolist()
    rank.data.batch["old_log_probs"] = before
    report["update"] = rank.update()
    report["logprobs_after_update"] = rank.logprobs().tolist()
    weights["updated"] = rank.weights()

    checkpoint = str(output / "checkpoint")
    rank.worker.save_checkpoint(checkpoint, global_step=1)
    report["continued"] = [rank.update() for _ in range(UPDATES_AFTER_CHECKPOINT)]
    weights["continued"] = rank.weights()
    rank.worker.load_checkpoint(checkpoint)
    weights["loaded"] = rank.weights()
    report["resumed"] = [rank.update() for _ in range(UPDATES_AFTER_CHECKPOINT)]
    weights["resumed"] = rank.weights()

    number = int(os.environ["RANK"])
    (output / f"rank{number}.json").write_text(json.dumps(report), encoding="utf-8")
    if number == 0:
        for name, tensors in weights.items():
            save_file(tensors, output / f"{name}.safetensors")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
