"""Fingerprints of tensors: equal exactly if every bit is equal, wherever they are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd, so that changing one number always changes the sum; its upper bits separate consecutive positions.
MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
CHUNK = 1 << 20


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a tensor.

    Attributes:
        checksum: Sum of all bit patterns, weighted by position, modulo 2**64.
        norm: Euclidean norm, for messages only.
    """

    checksum: str
    norm: float

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Fingerprint:
        """Computes the fingerprint, in chunks on the tensor's device."""
        flat = tensor.detach().contiguous().flatten()
        bits = flat.view(BITS[flat.element_size()])
        sums, squares = [], []
        for start in range(0, len(flat), CHUNK):
            positions = torch.arange(start, min(start + CHUNK, len(flat)), dtype=torch.int64, device=flat.device)
            sums.append((bits[start : start + CHUNK].to(torch.int64) * ((positions * MULTIPLIER) | 1)).sum())
            squares.append(flat[start : start + CHUNK].float().square().sum())
        if not sums:
            return cls("0" * 16, 0.0)
        total = int(torch.stack(sums).sum())
        return cls(f"{total % 2**64:016x}", float(torch.stack(squares).sum().sqrt()))

    def to_json(self) -> dict[str, Any]:
        """Returns the fingerprint as a JSON object."""
        return {"checksum": self.checksum, "norm": self.norm}
