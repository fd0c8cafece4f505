"""Entropy of the policy in the trainer's process, without copying all logits."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from rllm_verl import verl_api


def recomputed_entropy(logits: torch.Tensor, chunk_size: int = 2048) -> torch.Tensor:
    """Computes verl's chunked entropy, and keeps only the logits of a chunk for the backward pass.

    With verl's own loop over chunks, two float32 copies of all logits remain until the backward pass. Its
    ``entropy_checkpointing`` only moves them there: it recomputes all chunks together. Here, one chunk is recomputed at
    a time.

    Args:
        logits: ``(tokens, vocabulary)``.
        chunk_size: Tokens per chunk.

    Returns:
        ``(tokens,)`` entropy in nats, float32.
    """
    chunked = verl_api.use("entropy_from_logits_with_chunking")
    parts = [checkpoint(chunked, part, chunk_size, use_reentrant=False) for part in torch.split(logits, chunk_size)]
    return torch.cat(parts)
