"""The training path: the gradient does not depend on layout or passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rllm_local.attention import BlockCausalAttention
from rllm_local.model import recompute_layers, use_matching_attention
from rllm_local.packing import micro_batches, rows_of
from rllm_local.training import LocalTrainer
from transformers import AutoModelForCausalLM

from rllm_core.algorithms.aggregation import AGGREGATIONS, Aggregation
from rllm_core.backend import OptimizerStep
from rllm_core.builtin.losses import PPOClip, ReinforceLoss
from rllm_core.config import OptimizerConfig
from rllm_core.errors import RunError
from rllm_core.types import TrainingSample

CPU = torch.device("cpu")


@pytest.fixture
def trainer(model_folder: Path) -> Callable[..., LocalTrainer]:
    def build(**options: Any) -> LocalTrainer:
        defaults: dict[str, Any] = {
            "model": AutoModelForCausalLM.from_pretrained(model_folder).eval(),
            "loss": ReinforceLoss(),
            "aggregation": Aggregation("token_mean"),
            "temperature": 1.0,
            "optimizer_config": OptimizerConfig(learning_rate=1e-3),
            "share_prefixes": True,
            "max_batch_tokens": 4096,
        }
        return LocalTrainer(**{**defaults, **options})

    return build


def gradient(trainer: LocalTrainer, passes: Sequence[Sequence[TrainingSample]], entropy: float = 0.01) -> torch.Tensor:
    for samples in passes:
        trainer.forward_backward(trainer.batch(samples, skip_zero_advantages=entropy == 0), entropy)
    return torch.cat([p.grad.flatten() for p in trainer.parameters.values() if p.grad is not None])


def reference_gradient(
    trainer: LocalTrainer, samples: Sequence[TrainingSample], temperature: float, entropy: float
) -> torch.Tensor:
    """Reference implementation: one sample at a time, with all logits."""
    total = torch.zeros(())
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        logprobs = torch.log_softmax(trainer.model(input_ids=ids).logits[0, :-1] / temperature, -1)
        mask = torch.from_numpy(sample.loss_mask[1:])
        chosen = logprobs.gather(1, ids[0, 1:, None]).squeeze(1)[mask]
        entropies = -(logprobs.exp() * logprobs).sum(-1)[mask]
        total = total - (chosen * torch.tensor(sample.advantages)).sum() - entropy * entropies.sum()
    names, parameters = zip(*trainer.parameters.items(), strict=True)
    assert names
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, parameters)])


def assert_close(left: torch.Tensor, right: torch.Tensor) -> None:
    assert float((left - right).abs().max()) < 2e-5 * float(right.abs().max())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_and_padded_gradients_equal_the_plain_one(
    trainer: Callable[..., LocalTrainer], samples: list[TrainingSample], temperature: float, attention: str
) -> None:
    packed, padded = (trainer(share_prefixes=share, temperature=temperature) for share in (True, False))
    for built in (packed, padded):
        built.model.set_attn_implementation(attention)
    expected = reference_gradient(padded, samples, temperature, 0.01)
    assert_close(gradient(packed, [samples]), expected)
    assert_close(gradient(padded, [samples]), expected)


@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16])
def test_layers_that_are_computed_again_change_nothing(
    trainer: Callable[..., LocalTrainer], samples: list[TrainingSample], autocast_dtype: torch.dtype | None
) -> None:
    calls: list[torch.nn.Module] = []
    kept, recomputed = (trainer(autocast_dtype=autocast_dtype) for _ in range(2))
    recompute_layers(recomputed.model)
    for built in (kept, recomputed):
        mlp = built.model.get_decoder().layers[0].mlp
        mlp.register_forward_pre_hook(lambda module, _: calls.append(module))
    assert torch.equal(gradient(kept, [samples]), gradient(recomputed, [samples]))
    kept_calls = calls.count(kept.model.get_decoder().layers[0].mlp)
    assert calls.count(recomputed.model.get_decoder().layers[0].mlp) == 2 * kept_calls
    assert np.array_equal(np.concatenate(kept.logprobs(samples)), np.concatenate(recomputed.logprobs(samples)))


@pytest.mark.parametrize("max_batch_tokens", [1, 40, 100])
def test_micro_batches_change_nothing(
    trainer: Callable[..., LocalTrainer], samples: list[TrainingSample], max_batch_tokens: int
) -> None:
    whole = gradient(trainer(), [samples])
    assert_close(gradient(trainer(max_batch_tokens=max_batch_tokens), [samples]), whole)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_accumulation_over_passes_equals_one_pass(
    trainer: Callable[..., LocalTrainer], samples: list[TrainingSample], aggregation: str
) -> None:
    whole, parts = (trainer(aggregation=Aggregation(aggregation, 7)) for _ in range(2))
    assert_close(gradient(parts, [samples[:4], samples[4:9], samples[9:]]), gradient(whole, [samples]))


def test_aggregations_divide_as_they_say(trainer: Callable[..., LocalTrainer], samples: list[TrainingSample]) -> None:
    counts = OptimizerStep(step=1, total_steps=1, samples=13, sampled_tokens=95, trajectories=13)
    lengths = np.concatenate([[s.sampled_tokens] * s.sampled_tokens for s in samples])
    losses = -np.concatenate([s.advantages for s in samples])
    expected = {
        "token_mean": losses.sum() / 95,
        "sequence_mean_token_mean": (losses / lengths).sum() / 13,
        "sequence_mean_token_sum": losses.sum() / 13,
        "sequence_mean_token_sum_norm": losses.sum() / 13 / 7,
    }
    for aggregation in AGGREGATIONS:
        built = trainer(aggregation=Aggregation(aggregation, 7))
        gradient(built, [samples], entropy=0.0)
        assert built.step(counts).metrics["loss"] == pytest.approx(expected[aggregation], rel=1e-5)


def test_zero_advantages_are_skipped_without_changing_the_gradient(
    trainer: Callable[..., LocalTrainer], samples: list[TrainingSample]
) -> None:
    zeroed = [
        s.model_copy(update={"advantages": np.zeros_like(s.advantages)}) if i % 2 else s for i, s in enumerate(samples)
    ]
    skipping, keeping = trainer(), trainer()
    batch = skipping.batch(zeroed, skip_zero_advantages=True)
    assert len(batch.samples) == sum(1 for s in zeroed if s.advantages.any()) < len(zeroed)
    skipping.forward_backward(batch, 0.0)
    keeping.forward_backward(keeping.batch(zeroed, skip_zero_advantages=False), 0.0)
    for name, parameter in skipping.parameters.items():
        assert_close(parameter.grad, keeping.parameters[name].grad)


def test_a_step_without_gradient_still_moves_the_momentum(
    trainer: Callable[..., LocalTrainer], samples: list[TrainingSample]
) -> None:
    built = trainer()
    counts = OptimizerStep(step=1, total_steps=3, samples=13, sampled_tokens=95, trajectories=13)
    gradient(built, [samples])
    built.step(counts)
    before = built.model.get_input_embeddings().weight.detach().clone()
    result = built.step(replace(counts, step=2))
    assert result.metrics["grad_norm"] == 0
    assert not torch.equal(before, built.model.get_input_embeddings().weight)


def test_ppo_clip_with_shared_nodes(trainer: Callable[..., LocalTrainer], samples: list[TrainingSample]) -> None:
    """Duplicates share a node but keep their own ratios and advantages."""
    loss = PPOClip()
    packed, padded = (gradient(trainer(loss=loss, share_prefixes=share), [samples]) for share in (True, False))
    assert_close(packed, padded)


def test_logprobs_of_every_token(trainer: Callable[..., LocalTrainer], samples: list[TrainingSample]) -> None:
    packed, padded = (trainer(share_prefixes=share).logprobs(samples) for share in (True, False))
    for sample, left, right in zip(samples, packed, padded, strict=True):
        assert left.shape == right.shape == (sample.sampled_tokens,)
        assert np.abs(left - right).max() < 1e-5


def test_prefixes_are_encoded_once(samples: list[TrainingSample]) -> None:
    shared = rows_of(samples, longest_tree=math.inf, pair_cost=1e-3)
    plain = rows_of(samples, longest_tree=0, pair_cost=1e-3)
    assert sorted(i for row in shared for i in row.samples) == list(range(len(samples)))
    assert sum(row.tokens for row in plain) == sum(len(s.token_ids) - 1 for s in samples)
    group = next(row for row in shared if 0 in row.samples)
    # A prompt of 12, the answer's first three tokens, 75, 90 and 91; last tokens of samples are not read.
    assert group.tokens == 12 + 3 + 1 + 0 + 1


def test_long_answers_are_not_packed() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 100, 16)
    long = [
        TrainingSample(
            group_id=0,
            rollout_id=str(i),
            token_ids=np.concatenate([prompt, rng.integers(0, 100, 400)]),
            turn_spans=((16, 416),),
            logprobs=None,
            advantages=np.zeros(400),
            weight_versions=(0,),
        )
        for i in range(8)
    ]
    rows = rows_of(long, longest_tree=math.inf, pair_cost=1 / 100)
    assert [row.is_tree for row in rows] == [False] * 8


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_tree_shows_every_token_its_own_past(data: st.DataObject) -> None:
    prompts = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=3))
    answer = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    samples = []
    for group, prompt in enumerate(prompts):
        for tail in data.draw(st.lists(answer, min_size=1, max_size=5)):
            samples.append(
                TrainingSample(
                    group_id=group,
                    rollout_id=str(len(samples)),
                    token_ids=[*prompt, *tail],
                    turn_spans=((len(prompt), len(prompt) + len(tail)),),
                    logprobs=[-1.0] * len(tail),
                    advantages=[float(len(samples))] * len(tail),
                    weight_versions=(0,),
                )
            )
    rows = rows_of(samples, longest_tree=math.inf, pair_cost=data.draw(st.sampled_from([1e-6, 0.1, 10.0])))
    seen = []
    for micro in micro_batches(samples, rows, max_tokens=data.draw(st.integers(1, 60)), device=CPU):
        flat, width = micro.token_ids.flatten(), micro.token_ids.shape[1]
        token = 0
        for index, count in zip(micro.samples, micro.sample_tokens, strict=True):
            sample = samples[index]
            seen.append(index)
            start = sample.turn_spans[0][0]
            for offset in range(count):
                node = int(micro.nodes[micro.node_of_token[token]])
                past = sample.token_ids[: start + offset].tolist()
                row, column = divmod(node, width)
                if micro.visible is None or micro.positions is None:
                    columns = list(range(column + 1))
                else:
                    columns = micro.visible[row, 0, column].nonzero().flatten().tolist()
                    assert micro.positions[row, columns].tolist() == list(range(len(past)))
                assert flat.view(-1, width)[row, columns].tolist() == past
                assert int(micro.targets[token]) == sample.token_ids[start + offset]
                assert float(micro.advantages[token]) == index
                token += 1
    assert sorted(seen) == list(range(len(samples)))


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(
    trainer: Callable[..., LocalTrainer], samples: list[TrainingSample]
) -> None:
    built = trainer()
    before = [p.detach().clone() for p in built.parameters.values()]
    gradient(built, [samples])
    next(iter(built.parameters.values())).grad[0, 0] = float("nan")  # type: ignore[index]
    with pytest.raises(RunError, match="not finite"):
        built.step(OptimizerStep(step=1, total_steps=1, samples=13, sampled_tokens=95, trajectories=13))
    assert all(torch.equal(a, b) for a, b in zip(before, built.parameters.values(), strict=True))


def test_a_loss_that_needs_rollout_logprobs_says_so(
    trainer: Callable[..., LocalTrainer], samples: list[TrainingSample]
) -> None:
    built = trainer(loss=PPOClip())
    unknown = samples[0].model_copy(update={"logprobs": None})
    with pytest.raises(RunError, match="returned none"):
        built.batch([unknown], skip_zero_advantages=False)


@pytest.mark.parametrize("tokens", [128, 200, 287])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_block_causal_attention_equals_torchs(tokens: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = normal(3, tokens, 4, 8).transpose(1, 2).requires_grad_()
    key, value = (normal(3, tokens, kv_heads, 8).transpose(1, 2).requires_grad_() for _ in range(2))
    mine = BlockCausalAttention.apply(query, key, value, 0.3)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    assert torch.allclose(mine, theirs, atol=1e-12)
    outer = normal(3, tokens, 4, 8)
    gradients = (torch.autograd.grad(mixed, (query, key, value), outer) for mixed in (mine, theirs))
    for left, right in zip(*gradients, strict=True):
        assert torch.allclose(left, right, atol=1e-12)


def completions(lengths: Sequence[int]) -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    return [
        TrainingSample(
            group_id=number,
            rollout_id=f"of {length}",
            token_ids=rng.integers(0, 250, length),
            turn_spans=((16, length),),
            logprobs=None,
            advantages=rng.normal(size=length - 16),
            weight_versions=(0,),
        )
        for number, length in enumerate(lengths)
    ]


def test_rows_of_any_length_train_alike_with_either_attention(
    trainer: Callable[..., LocalTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = completions((40, 140, 150, 300))
    plain, blocks = trainer(), trainer()
    use_matching_attention(blocks.model, "highest")
    calls: list[torch.Size] = []
    apply = BlockCausalAttention.apply
    monkeypatch.setattr(BlockCausalAttention, "apply", lambda *a: (calls.append(a[0].shape), apply(*a))[1])
    assert_close(gradient(blocks, [samples]), gradient(plain, [samples]))
    assert calls
    assert blocks.model.config._attn_implementation not in blocks.model.config.to_json_string()
