"""The warm start of the starter model: supervised training on conversations that teach only the form of answers."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from rllm_core.algorithms.aggregation import Aggregation
from rllm_core.backend import OptimizerStep
from rllm_core.builtin.losses import CrossEntropy
from rllm_core.config import OptimizerConfig
from rllm_core.errors import RunError
from rllm_core.types import TrainingSample, token_ids
from rllm_local.training import LocalTrainer

Conversation = list[dict[str, Any]]
SAY_EVERY_SECONDS = 5.0


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    conversations: Iterator[Conversation],
    settings: Mapping[str, Any],
) -> tuple[int, float]:
    """Trains on assistant messages until the running loss is below the target, then cools down.

    Without a target, it trains until the loss no longer falls, or until it must cool down.

    Args:
        model: Fresh model.
        tokenizer: Its tokenizer.
        conversations: Endless conversations.
        settings: ``warm_start`` of the recipe, see `rllm_local.starter`.

    Returns:
        Number of steps, and the last running loss in nats per token.

    Raises:
        RunError: If the loss does not reach the target.
    """
    optimizer_config = OptimizerConfig(learning_rate=settings["learning_rate"], warmup_steps=settings["warmup_steps"])
    trainer = LocalTrainer(
        model=model.train(False),
        loss=CrossEntropy(),
        aggregation=Aggregation("token_mean"),
        temperature=1.0,
        optimizer_config=optimizer_config,
        share_prefixes=True,
        max_batch_tokens=4096,
    )
    average, converged_at, said_at = None, None, time.monotonic()
    target, progress = settings["target_loss"], _Progress(settings)
    for step in range(1, settings["max_steps"] + 1):
        if converged_at is not None:
            done = (step - converged_at) / settings["cool_down_steps"]
            rate = settings["learning_rate"] * (1.0 - done * (1.0 - settings["final_learning_rate_fraction"]))
            trainer.optimizer_config = optimizer_config.model_copy(update={"learning_rate": rate})
        samples = _samples(list(islice(conversations, settings["conversations_per_step"])), tokenizer)
        trainer.forward_backward(trainer.batch(samples, skip_zero_advantages=False), 0.0)
        metrics = trainer.step(
            OptimizerStep(
                step=step,
                total_steps=settings["max_steps"],
                samples=len(samples),
                sampled_tokens=sum(sample.sampled_tokens for sample in samples),
                trajectories=len(samples),
            )
        ).metrics
        decay = settings["loss_decay"] if average is not None else 0.0
        average = decay * (average or 0.0) + (1 - decay) * metrics["loss"]
        if converged_at is None and (progress.has_ended(step, metrics["loss"]) if not target else average < target):
            converged_at = step
        if time.monotonic() - said_at > SAY_EVERY_SECONDS:
            said_at = time.monotonic()
            goal = f"stops below {target}" if target else "stops when it no longer falls"
            aim = goal if converged_at is None else "almost done"
            print(f"  step {step}: loss {average:.2f}, {aim}", file=sys.stderr, flush=True)
        if converged_at is not None and step == converged_at + settings["cool_down_steps"]:
            return step, average
    raise RunError(
        f"the starter model's warm start stopped at loss {average} after {settings['max_steps']} steps; "
        f"it should have fallen below {target}"
    )


class _Progress:
    """Progress of a loss without a target, relative to itself: compares the means of windows of steps."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._window: list[float] = []
        self._best = math.inf

    def has_ended(self, step: int, loss: float) -> bool:
        """Whether the loss no longer falls, or no more steps are left than cooling down takes."""
        self._window.append(loss)
        if len(self._window) == self._settings["window_steps"]:
            mean, self._window = sum(self._window) / len(self._window), []
            if mean > self._best * (1 - self._settings["least_progress"]):
                return True
            self._best = mean
        return bool(step == self._settings["max_steps"] - self._settings["cool_down_steps"])


def _samples(conversations: list[Conversation], tokenizer: PreTrainedTokenizerFast) -> list[TrainingSample]:
    """Converts conversations to training samples whose targets are the assistant messages."""
    texts: Any = tokenizer.apply_chat_template(conversations, tokenize=False)
    encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    samples = []
    for row, encoding in enumerate(encoded):
        tokens = encoding.ids
        spans, position = [], 0
        while opening[0] in tokens[position:]:
            position = tokens.index(opening[0], position)
            if tokens[position : position + len(opening)] == opening:
                start = position + len(opening)
                spans.append((start, tokens.index(tokenizer.eos_token_id, start) + 1))
            position += 1
        sampled = sum(stop - start for start, stop in spans)
        samples.append(
            TrainingSample(
                sample_id=str(row),
                group_id=0,
                rollout_id=str(row),
                token_ids=token_ids(tokens[: spans[-1][1]]),
                turn_spans=tuple(spans),
                logprobs=None,
                advantages=np.ones(sampled, np.float32),
                weight_versions=(0,) * len(spans),
            )
        )
    return samples
