"""Fingerprints of tensors: equal exactly if every bit is equal, wherever they are computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
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

    def to_json(self) -> dict[str, Any]:
        """Returns the fingerprint as a JSON object."""
        return {"checksum": self.checksum, "norm": self.norm}


@dataclass(frozen=True)
class _Piece:
    """Consecutive numbers of one tensor.

    Attributes:
        tensor: Index of the tensor.
        start: Position of the first number in it.
        values: ``(numbers,)``
    """

    tensor: int
    start: int
    values: torch.Tensor

    def positions(self) -> torch.Tensor:
        """Returns the position of each number in the tensor."""
        return torch.arange(self.start, self.start + len(self.values), dtype=torch.int64, device=self.values.device)


def fingerprints(tensors: Iterable[torch.Tensor]) -> list[Fingerprint]:
    """Computes fingerprints on the tensors' devices.

    Adapters are many small tensors, for which calling torch takes longer than adding up, so they are taken together.
    """
    sums: dict[int, int] = defaultdict(int)
    squares: dict[int, float] = defaultdict(float)
    for group in _groups(tensors):
        values = torch.cat([piece.values for piece in group])
        positions = torch.cat([piece.positions() for piece in group])
        bits = values.view(BITS[values.element_size()]).to(torch.int64)
        for piece, total in _totals(group, bits * ((positions * MULTIPLIER) | 1)):
            sums[piece.tensor] += total
        for piece, total in _totals(group, values.float().square()):
            squares[piece.tensor] += total
    return [Fingerprint(f"{sums[index] % 2**64:016x}", squares[index] ** 0.5) for index in sums]


def _groups(tensors: Iterable[torch.Tensor]) -> Iterator[list[_Piece]]:
    """Yields all numbers in order, in groups of at most ``CHUNK`` of one type and device."""
    group: list[_Piece] = []
    room = CHUNK
    for index, tensor in enumerate(tensors):
        flat = tensor.detach().contiguous().flatten()
        for start in range(0, max(1, len(flat)), CHUNK):
            values = flat[start : start + CHUNK]
            is_alike = not group or (values.dtype, values.device) == (group[0].values.dtype, group[0].values.device)
            if len(values) > room or not is_alike:
                yield group
                group, room = [], CHUNK
            group.append(_Piece(index, start, values))
            room -= len(values)
    if group:
        yield group


def _totals(group: list[_Piece], numbers: torch.Tensor) -> Iterator[tuple[_Piece, Any]]:
    """Yields each piece with the sum of its part of ``numbers``."""
    parts = torch.split(numbers, [len(piece.values) for piece in group])
    return zip(group, torch.stack([part.sum() for part in parts]).tolist(), strict=True)
