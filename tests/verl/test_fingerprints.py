"""Fingerprints of tensors, and where a worker of a split server has which part of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rllm_verl.fingerprint import CHUNK, Fingerprint, fingerprints
from rllm_verl.served import Served
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    VocabParallelEmbedding,
    VocabParallelEmbeddingShardIndices,
)

HEAD, HIDDEN, WIDE, WORDS = 4, 16, 24, 10
QUERIES, KEYS = 4, 2  # heads


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    [found] = fingerprints([tensor])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_every_changed_number_and_every_exchange_of_two_changes_the_checksum(dtype: torch.dtype) -> None:
    original = torch.arange(1, 301).to(dtype).view(3, 100)
    checksum = fingerprint(original).checksum
    assert fingerprint(original.clone()).checksum == checksum
    found = {checksum}
    for place in range(original.numel()):
        changed = original.clone().view(-1)
        changed[place] += 1 + changed[place] // 64  # the next number that a bfloat16 can be
        found.add(fingerprint(changed).checksum)
    assert len(found) == 301
    swapped = original[[1, 0, 2]]
    assert fingerprint(swapped).checksum != checksum
    assert fingerprint(swapped).norm == pytest.approx(fingerprint(original).norm)


def test_chunks_are_put_together() -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2 * CHUNK + 7, generator=generator)
    checksum = fingerprint(whole).checksum
    for place in (0, CHUNK - 1, CHUNK, 2 * CHUNK + 6):
        changed = whole.clone()
        changed[place] = torch.nextafter(changed[place], torch.tensor(torch.inf))
        assert fingerprint(changed).checksum != checksum
    assert fingerprint(whole).norm == pytest.approx(float(whole.double().norm()), rel=1e-4)


def test_tensors_have_the_same_fingerprints_together_as_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (0,), (CHUNK - 7,), (2, 4), (CHUNK + 9,), (1,), (6,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[3], tensors[5] = tensors[3].bfloat16(), tensors[5].long() + 1
    together = fingerprints(iter(tensors))
    alone = [fingerprint(tensor) for tensor in tensors]
    assert [each.checksum for each in together] == [each.checksum for each in alone]
    assert [each.norm for each in together] == pytest.approx([each.norm for each in alone])
    assert len({each.checksum for each in together}) == len(tensors)


def test_the_checksum_is_that_of_its_definition() -> None:
    numbers = [3, -1, 2**40, 0]
    expected = sum(number * (place * 0x9E3779B97F4A7C15 | 1) for place, number in enumerate(numbers)) % 2**64
    together = fingerprints([torch.ones(5), torch.tensor(numbers), torch.tensor(numbers)])
    assert [each.checksum for each in together[1:]] == [f"{expected:016x}"] * 2


def test_values_decide_and_not_the_layout() -> None:
    matrix = torch.randn(6, 8)
    assert fingerprint(matrix.t().contiguous().t()) == fingerprint(matrix)
    assert fingerprint(torch.empty(0)).norm == 0
    assert fingerprint(torch.zeros(2)).checksum != fingerprint(torch.tensor([0.0, -0.0])).checksum


# --------------------------------------------------------------------------------------------------------------------
# Servers that are split over two or four devices


def layer(kind: type[torch.nn.Module], weight: torch.Tensor, **attributes: Any) -> torch.nn.Module:
    """A layer of vLLM as it is on one worker, without the process group that its constructor needs."""
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    for name, value in attributes.items():
        setattr(made, name, value)
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    return made


def worker(weights: dict[str, torch.Tensor], rank: int, size: int) -> torch.nn.Module:
    """Model with one layer as on ``rank`` of ``size`` workers, split as Megatron-LM does (Shoeybi et al. 2019)."""
    heads, copies = QUERIES // size, max(1, size // KEYS)
    keys = max(1, KEYS // size)
    q, k, v = (weights[f"{name}_proj"] for name in "qkv")
    mine = slice((rank // copies) * keys * HEAD, (rank // copies + 1) * keys * HEAD)
    packed = torch.cat([q[rank * heads * HEAD :][: heads * HEAD], k[mine], v[mine]])
    common = {"tp_rank": rank, "tp_size": size, "quant_method": UnquantizedLinearMethod()}
    wide, words = WIDE // size, WORDS // size
    gate_up = torch.cat([weights[name][rank * wide :][:wide] for name in ("gate_proj", "up_proj")])
    model = torch.nn.Module()
    model.packed_modules_mapping = {  # type: ignore[assignment]
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    model.part = torch.nn.Module()
    model.part.qkv_proj = layer(
        QKVParallelLinear,
        packed,
        **common,
        num_heads=heads,
        num_kv_heads=keys,
        head_size=HEAD,
        num_kv_head_replicas=copies,
    )
    model.part.gate_up_proj = layer(MergedColumnParallelLinear, gate_up, **common, output_sizes=[WIDE, WIDE])
    down = weights["down_proj"][:, rank * wide :][:, :wide]
    model.part.down_proj = layer(RowParallelLinear, down, **common, output_size=HIDDEN, input_size_per_partition=wide)
    padded = torch.cat([weights["embed_tokens"][rank * words :][:words], torch.zeros(3, HIDDEN)])
    first, last = rank * words, (rank + 1) * words
    indices = VocabParallelEmbeddingShardIndices(first, last, 0, 0, first, last, 0, 0)
    model.part.embed_tokens = layer(VocabParallelEmbedding, padded, shard_indices=indices)
    model.part.norm = torch.nn.LayerNorm(HIDDEN)
    model.part.norm.weight.data.copy_(weights["norm"])
    return model


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_workers_together_have_every_tensor(size: int) -> None:
    rows = {"q": QUERIES * HEAD, "k": KEYS * HEAD, "v": KEYS * HEAD, "gate": WIDE, "up": WIDE}
    weights = {f"{name}_proj": torch.randn(count, HIDDEN) for name, count in rows.items()}
    words = WORDS // size * size
    weights |= {"down_proj": torch.randn(HIDDEN, WIDE), "embed_tokens": torch.randn(words, HIDDEN)}
    weights |= {"norm": torch.randn(HIDDEN)}
    for name, whole in weights.items():
        seen = torch.zeros_like(whole, dtype=torch.bool)
        for rank in range(size):
            part = Served(worker(weights, rank, size), None).part(f"part.{name}.weight")
            assert part is not None, name
            place = (slice(*part.rows),) + (() if part.columns is None else (slice(*part.columns),))
            torch.testing.assert_close(part.tensor.data, whole[place], rtol=0, atol=0, msg=f"{name} on {rank}")
            seen[place] = True
        assert seen.all(), name


def test_what_is_stored_in_another_shape_is_not_compared() -> None:
    model = torch.nn.Module()
    model.part = torch.nn.Module()
    model.part.packed_experts = torch.nn.Module()
    model.part.packed_experts.weight = torch.nn.Parameter(torch.randn(2, 3, 4))
    quantized = layer(RowParallelLinear, torch.randn(4, 4), tp_rank=0, output_size=4, input_size_per_partition=4)
    quantized.quant_method = object()  # type: ignore[assignment]
    model.part.down_proj = quantized
    served = Served(model, None)
    assert served.adapter() is None
    for name in ("part.packed_experts.weight", "part.down_proj.weight", "part.missing.weight", "part.down_proj.lora_A"):
        assert served.part(name) is None, name
