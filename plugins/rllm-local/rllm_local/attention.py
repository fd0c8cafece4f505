"""Causal self-attention for training small models on the CPU, as an attention implementation of transformers.

Each block of queries attends to the keys up to its end, so about half of the pairs are never computed. The
probabilities are kept for the backward pass. At a few hundred tokens, this takes three quarters of the time of torch's
fused attention. Memory grows with the square of the length, so torch's implementation handles everything else: masks,
caches, short and very long rows, other devices and dtypes.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "rllm_block_causal"
BLOCK_QUERIES = 64
TOKENS = range(128, 1025)


class BlockCausalAttention(torch.autograd.Function):
    """Attention of ``(rows, heads, tokens, head_dim)`` queries to ``(rows, kv heads, tokens, head_dim)``."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        """Returns the mixed values, ``(rows, tokens, heads, head_dim)``."""
        rows, heads, tokens, dim = query.shape
        kv_heads = key.shape[1]
        groups = heads // kv_heads
        queries = (query * scaling).view(rows, kv_heads, groups, tokens, dim)
        keys, values = (x.reshape(rows * kv_heads, tokens, dim) for x in (key, value))
        mixed = query.new_empty(rows, tokens, kv_heads, groups, dim)
        future = query.new_full((BLOCK_QUERIES, BLOCK_QUERIES), float("-inf")).triu_(1)
        probabilities = []
        for start in range(0, tokens, BLOCK_QUERIES):
            end = min(tokens, start + BLOCK_QUERIES)
            count = end - start
            asking = queries[:, :, :, start:end].reshape(rows * kv_heads, groups * count, dim)
            scores = torch.bmm(asking, keys[:, :end].transpose(1, 2))
            scores.view(-1, groups, count, end)[..., start:] += future[:count, :count]
            probabilities.append(torch.softmax(scores, -1))
            answers = torch.bmm(probabilities[-1], values[:, :end]).view(rows, kv_heads, groups, count, dim)
            mixed[:, start:end] = answers.permute(0, 3, 1, 2, 4)
        ctx.save_for_backward(queries, keys, values, *probabilities)
        ctx.scaling = scaling
        return mixed.view(rows, tokens, heads, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        """Returns the gradients of query, key and value."""
        queries, keys, values, *probabilities = ctx.saved_tensors
        rows, kv_heads, groups, tokens, dim = queries.shape
        gradient = gradient.view(rows, tokens, kv_heads, groups, dim)
        of_queries, of_keys, of_values = (torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values))
        for number, block in enumerate(probabilities):
            start = number * BLOCK_QUERIES
            end = min(tokens, start + BLOCK_QUERIES)
            asking = queries[:, :, :, start:end].reshape(rows * kv_heads, -1, dim)
            of_mixed = gradient[:, start:end].permute(0, 2, 3, 1, 4).reshape(rows * kv_heads, -1, dim)
            of_values[:, :end].baddbmm_(block.transpose(1, 2), of_mixed)
            of_block = torch.bmm(of_mixed, values[:, :end].transpose(1, 2))
            of_scores = torch._softmax_backward_data(of_block, block, -1, block.dtype)
            of_keys[:, :end].baddbmm_(of_scores.transpose(1, 2), asking)
            of_queries[:, :, :, start:end] = torch.bmm(of_scores, keys[:, :end]).view(rows, kv_heads, groups, -1, dim)
        of_queries = of_queries.mul_(ctx.scaling).view(rows, kv_heads * groups, tokens, dim)
        shape = (rows, kv_heads, tokens, dim)
        return of_queries, of_keys.view(shape), of_values.view(shape), None


def block_causal_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Entry point for transformers; see ``sdpa_attention_forward`` for the arguments."""
    fits = (
        attention_mask is None
        and torch.is_grad_enabled()
        and query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype == torch.float32
        and query.shape[2] == key.shape[2]
        and query.shape[3] == value.shape[3]
        and dropout == 0
        and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        and all(options.get(name) is None for name in ("position_bias", "softcap", "s_aux", "cache"))
    )
    tokens, scale = query.shape[2], query.shape[-1] ** -0.5 if scaling is None else scaling
    mixed: torch.Tensor
    if fits and tokens in TOKENS:
        mixed = BlockCausalAttention.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    else:
        mixed, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **options
        )
    return mixed, None


def register() -> None:
    """Registers the implementation with transformers under ``NAME``."""
    AttentionInterface.register(NAME, block_causal_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
