"""A model with a real vocabulary, and a bare training loop of transformers on it, whose memory is compared.

As a module it is a side, like `benchmarks.core_side`.
"""

from __future__ import annotations

import resource
from pathlib import Path

from benchmarks.sides import Gate, serve
from benchmarks.trials import Row

VOCABULARY = 151_936


def make_real_vocabulary_model(folder: Path) -> Path:
    """Writes a Qwen2 of 8 layers, 512 wide, with random weights and a tokenizer for all of its ids."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from benchmarks.gpu_models import make_tokenizer

    tokenizer = make_tokenizer(VOCABULARY)
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=2048,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def peak_mb() -> float:
    """Returns the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def train(request: Row, gate: Gate) -> Row:
    """Trains as people write it: `generate`, all logits of a batch, one row's distribution at a time, AdamW."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks import endless
    from benchmarks.workloads import plugin_manager, run_config, training_tasks

    torch.set_num_threads(1)
    config = run_config(
        plugin_manager(), request["workload"], model=request["model"], seed=request["seed"], steps=request["steps"]
    )
    groups, rollouts = config.training.groups_per_step, config.training.rollouts_per_group
    tokens = config.rollout.max_response_tokens
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32).train(False)
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
    )
    tasks = training_tasks(endless.EndlessWorkflow(None), config)
    gate.open_first()
    for step in range(config.training.steps):
        chosen = tasks[step * groups : (step + 1) * groups]
        prompts = torch.tensor([tokenizer.encode(task.data["word"]) for task in chosen])
        with torch.no_grad():
            sequences = model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                num_return_sequences=rollouts,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
            )
        sampled = sequences[:, prompts.shape[1] :]
        rewards = torch.tensor([endless.even_share(tokenizer.decode(row)) for row in sampled]).view(groups, rollouts)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        logits = model(input_ids=sequences, use_cache=False, logits_to_keep=tokens + 1).logits[:, :-1]
        logprobs = torch.stack(
            [row.log_softmax(-1).gather(-1, ids[:, None])[:, 0] for row, ids in zip(logits, sampled, strict=True)]
        )
        (-(advantages.view(-1, 1) * logprobs).mean()).backward()
        del logits, logprobs
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        gate.step_ended(step + 1, peak_mb=peak_mb())
    return {"reward_mean": None}


if __name__ == "__main__":
    serve(train)
