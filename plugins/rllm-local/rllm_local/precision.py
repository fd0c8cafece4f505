"""torch's precision of float32 products, which applies to all threads of the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

EXACT_ERROR = 1e-5


@contextmanager
def matmul_precision(precision: str | None) -> Iterator[None]:
    """Sets the precision; None leaves it as it is."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision or before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def is_exact(precision: str) -> bool:
    """Returns whether this CPU computes float32 products of this precision in float32; some round to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=generator) for _ in range(2))
    with matmul_precision(precision):
        product = left @ right
    exact = left.double() @ right.double()
    return float((product - exact).abs().max() / exact.abs().max()) < EXACT_ERROR
