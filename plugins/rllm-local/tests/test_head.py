"""The output head over chunks of nodes: the same numbers and gradients as over a whole pass, in less memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from allocations import Allocations
from rllm_local import memory
from rllm_local.config import LocalConfig, LoRAConfig
from rllm_local.head import Head
from rllm_local.model import load_model
from rllm_local.training import LocalTrainer
from transformers import AutoConfig, AutoModelForCausalLM

from rllm_core.algorithms.aggregation import Aggregation
from rllm_core.algorithms.torch_losses import PolicyLoss
from rllm_core.builtin import LOSSES, losses
from rllm_core.builtin.losses import CrossEntropy, PPOClip
from rllm_core.config import KLConfig, OptimizerConfig
from rllm_core.types import TrainingSample

OF_LOGPROBS, OF_GRADIENTS = 4e-6, 1e-5  # largest differences, absolute and relative
CHUNK_NODES = 7  # does not divide the nodes of the samples
TINY = {
    "vocab_size": 283,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "pad_token_id": 0,
}


def trainer_of(model: Any, loss: PolicyLoss | None = None, **options: Any) -> LocalTrainer:
    defaults: dict[str, Any] = {
        "aggregation": Aggregation("token_mean"),
        "temperature": 0.7,
        "optimizer_config": OptimizerConfig(learning_rate=1e-3),
        "share_prefixes": True,
        "max_batch_tokens": 4096,
    }
    return LocalTrainer(model=model, loss=loss or PPOClip(), **{**defaults, **options})


@pytest.fixture
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[LocalTrainer, int], None]:
    def limit(trainer: LocalTrainer, nodes: int) -> None:
        monkeypatch.setattr(memory, "CPU_CHUNK_LOGITS", nodes * trainer.model.get_output_embeddings().weight.shape[0])

    return limit


def results(trainer: LocalTrainer, samples: Sequence[TrainingSample], entropy: float) -> tuple[torch.Tensor, ...]:
    """Returns log-probabilities, entropies and the gradient, which is reset."""
    trainer.forward_backward(trainer.batch(samples, skip_zero_advantages=False), entropy)
    measures = [trainer._sums.tokens[sample.sample_id] for sample in samples]
    logprobs = np.concatenate([each.logprobs for each in measures])
    without_gradient = np.concatenate(trainer.logprobs(samples))
    entropies = np.concatenate([each.entropies for each in measures if each.entropies is not None] or [[]])
    gradients = [weight.grad for weight in trainer.parameters.values()]
    found = torch.cat([each.flatten() for each in gradients if each is not None])
    torch._foreach_zero_([each for each in gradients if each is not None])
    return torch.tensor(logprobs), torch.tensor(without_gradient), torch.tensor(entropies), found


def assert_same_in_chunks(trainer: LocalTrainer, samples: Sequence[TrainingSample], limit: Any, entropy: float) -> None:
    plain = results(trainer, samples, entropy)
    limit(trainer, CHUNK_NODES)
    chunked = results(trainer, samples, entropy)
    for expected, found in zip(plain[:3], chunked[:3], strict=True):
        assert len(expected) == len(found)
        assert float((expected - found).abs().max() if len(expected) else 0) < OF_LOGPROBS
    assert float((plain[3] - chunked[3]).abs().max()) < OF_GRADIENTS * float(plain[3].abs().max())
    assert not torch.equal(plain[3], chunked[3]), "the chunked path was not taken"


def with_reference(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    rng = np.random.default_rng(1)
    return [
        sample.model_copy(update={"reference_logprobs": rng.uniform(-6, -4, len(sample.advantages)).astype(np.float32)})
        for sample in samples
    ]


@pytest.mark.parametrize("share_prefixes", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_every_loss_has_the_same_gradient(
    model_folder: Path, samples: list[TrainingSample], in_chunks: Any, loss: str, share_prefixes: bool
) -> None:
    trainer = trainer_of(
        AutoModelForCausalLM.from_pretrained(model_folder).eval(),
        getattr(losses, LOSSES[loss][0])(),
        share_prefixes=share_prefixes,
        kl=KLConfig(coefficient=0.1, place="loss"),
    )
    assert_same_in_chunks(trainer, with_reference(samples), in_chunks, 0.02)


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "with a bias": ("phi", {"tie_word_embeddings": False}),
    "capped": ("gemma2", {"final_logit_softcapping": 0.5, "tie_word_embeddings": True}),
    "scaled": ("cohere", {"logit_scale": 0.3, "tie_word_embeddings": True}),
    "scaled, with experts": ("granitemoe", {"logits_scaling": 3.0, "num_local_experts": 2, "num_experts_per_tok": 1}),
}


@pytest.mark.parametrize("entropy", [0.0, 0.02])
@pytest.mark.parametrize("head", HEADS)
def test_every_head_has_the_same_gradient(
    samples: list[TrainingSample], in_chunks: Any, head: str, entropy: float
) -> None:
    model_type, options = HEADS[head]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **TINY | options)
    trainer = trainer_of(AutoModelForCausalLM.from_config(config).eval(), CrossEntropy(), temperature=1.0)
    assert trainer._head.takes_hidden_states
    assert_same_in_chunks(trainer, samples, in_chunks, entropy)


def test_a_head_whose_model_reads_more_than_hidden_states_computes_all_logits(
    samples: list[TrainingSample], in_chunks: Any
) -> None:
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **TINY)).eval()
    forward = model.forward

    def shifted(**inputs: Any) -> Any:
        output = forward(**inputs)
        output.logits = output.logits + inputs["input_ids"][..., None] % 7 * torch.arange(283) / 283
        return output

    model.forward = shifted
    trainer = trainer_of(model)
    assert not trainer._head.takes_hidden_states
    plain = results(trainer, samples, 0.0)
    in_chunks(trainer, CHUNK_NODES)
    assert torch.equal(results(trainer, samples, 0.0)[3], plain[3])


@pytest.mark.filterwarnings("ignore:.*a tied layer is part of the adapter")
@pytest.mark.parametrize("layers", [(), ("lm_head", "q_proj")], ids=["every layer", "the head too"])
def test_adapters_have_the_same_gradient(
    model_folder: Path, samples: list[TrainingSample], in_chunks: Any, layers: tuple[str, ...]
) -> None:
    lora = LoRAConfig(rank=4, target_modules=layers)
    model: Any = load_model(model_folder, LocalConfig(device="cpu", lora=lora))
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # zero at first, so that A has no gradient
            torch.nn.init.normal_(weight, std=0.1)
    assert_same_in_chunks(trainer_of(model), samples, in_chunks, 0.02)


def test_gradients_in_bfloat16_are_as_exact_as_the_plain_ones(
    model_folder: Path, samples: list[TrainingSample], in_chunks: Any
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    exact = results(trainer_of(model), samples, 0.02)
    trainer = trainer_of(model, autocast_dtype=torch.bfloat16)
    plain = results(trainer, samples, 0.02)
    in_chunks(trainer, CHUNK_NODES)
    chunked = results(trainer, samples, 0.02)
    for truth, before, found in zip(exact, plain, chunked, strict=True):
        assert float((found - truth).norm()) < 1.1 * float((before - truth).norm())
    assert float((plain[0] - chunked[0]).abs().max()) < OF_LOGPROBS


def test_only_what_needs_a_gradient_gets_one() -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **TINY)).eval()
    head, weight = Head(model, 1.0, None), model.get_output_embeddings().weight
    hidden, nodes, targets = torch.randn(20, 32), torch.arange(20), torch.arange(20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "CPU_CHUNK_LOGITS", 283 * CHUNK_NODES)
        weight.grad = None
        head.numbers(hidden, nodes, targets, entropy=False)[0].sum().backward()
        assert weight.grad is not None
        first = weight.grad.clone()
        head.numbers(hidden, nodes, targets, entropy=False)[0].sum().backward()
        assert torch.allclose(weight.grad, 2 * first)
        weight.requires_grad_(False)
        head.numbers(hidden.requires_grad_(), nodes, targets, entropy=False)[0].sum().backward()
        assert hidden.grad is not None
        assert torch.allclose(weight.grad, 2 * first)


@pytest.mark.slow
@pytest.mark.parametrize("entropy", [0.0, 0.01])
def test_memory_does_not_grow_with_the_nodes(entropy: float) -> None:
    vocabulary, hidden = 40_009, 16
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "qwen3", **TINY | {"vocab_size": vocabulary, "hidden_size": hidden, "tie_word_embeddings": True}
        )
    ).eval()
    trainer = trainer_of(model)
    peaks = []
    for tokens in (500, 1500):
        rng = np.random.default_rng(0)
        built = [
            TrainingSample(
                group_id=0,
                rollout_id=str(number),
                token_ids=rng.integers(0, vocabulary, 101).astype(np.int32),
                turn_spans=((1, 101),),
                logprobs=np.full(100, -8.0, np.float32),
                advantages=np.ones(100, np.float32),
                weight_versions=(0,),
            )
            for number in range(tokens // 100)
        ]
        live = Allocations(lambda _: "all")
        live.ignore([*model.parameters(), *(weight.grad for weight in model.parameters())])
        with live:
            trainer.forward_backward(trainer.batch(built, skip_zero_advantages=True), entropy)
        peaks.append(live.peak_bytes["all"])
    # Two chunks of 2**24 float32 numbers, the gradient of the embedding, and activations.
    chunks, embedding = 2 * 4 * 2**24, 4 * vocabulary * hidden
    assert peaks[1] < chunks + embedding + 10e6
    assert peaks[1] - peaks[0] < 10e6  # 1,000 nodes more have 480 MB of logits and gradients


def test_a_gradient_in_bfloat16_is_added_in_parts(samples: list[TrainingSample], in_chunks: Any) -> None:
    vocabulary, hidden = 40_009, 32
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3", **TINY | {"vocab_size": vocabulary, "tie_word_embeddings": True})
    ).eval()
    trainer = trainer_of(model, autocast_dtype=torch.bfloat16)
    in_chunks(trainer, CHUNK_NODES)
    is_whole = (torch.bfloat16, vocabulary * hidden)
    live = Allocations(lambda tensor: "whole" if (tensor.dtype, tensor.numel()) == is_whole else "other")
    live.ignore([*model.parameters(), *(weight.grad for weight in model.parameters())])
    with live:
        trainer.forward_backward(trainer.batch(samples, skip_zero_advantages=True), 0.0)
    assert live.peak_bytes["whole"] == 2 * vocabulary * hidden  # the matrix, and no product of its size
