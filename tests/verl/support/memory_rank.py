"""Measures the memory of one rank of a verl ``TrainingWorker``: ``python memory_rank.py MODEL_FOLDER OUTPUT_FOLDER``.

Reads its rank from the environment, takes one optimizer step, and writes the bytes of weights, gradients, optimizer
state and logits to ``rank<N>.json``, with the number of its tokens.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "plugins" / "rllm-local" / "tests" / "support"))

import torch
from allocations import Allocations, logits_or_other
from torch.distributed.tensor import DTensor
from training_rank import Rank


def local_bytes(tensors: Iterable[Any]) -> int:
    """Returns the bytes of this rank's shards; FSDP2 puts the gradients of a layer into one storage."""
    shards = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    storages = [shard.untyped_storage() for shard in shards]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def main() -> None:
    model, output = sys.argv[1], Path(sys.argv[2])
    rank = Rank(model)
    engine = rank.worker.engine
    rank.data.batch["old_log_probs"] = rank.logprobs()
    weights = list(engine.module.parameters())
    measured: dict[str, int] = {"weights": local_bytes(weights), "tokens": int(rank.data.batch["attention_mask"].sum())}

    def count_gradients(*_: Any) -> None:
        measured["gradients"] = local_bytes(weight.grad for weight in weights if weight.requires_grad)

    engine.optimizer.register_step_pre_hook(count_gradients)
    config = rank.worker.model_config.hf_config
    live = Allocations(logits_or_other(config.vocab_size, config.hidden_size))
    with live:
        rank.update()
    states = [each for state in engine.optimizer.state.values() for each in state.values()]
    measured |= {"optimizer": local_bytes(states), "logits": live.peak_bytes["logits"]}
    (output / f"rank{os.environ['RANK']}.json").write_text(json.dumps(measured), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
