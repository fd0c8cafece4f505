"""Key-value cache of the fused decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from rllm_local.memory import CACHE_STEP_POSITIONS, KEPT_BLOCK_BYTES


class Cache:
    """Keys and values of a batch's sequences, with free positions after the used ones.

    A small cache is one tensor. It doubles when it is full, alternating between two permanent blocks of memory: C
    libraries return large blocks to the kernel, and faulting in new ones takes longer than filling them. A large cache
    has one tensor each for the keys and the values of every layer. It grows by a few positions, one tensor at a time,
    so that only one tensor exists twice.

    Every row has a copy of its whole prompt. `rllm_local.engine` counts the prompt once per row, so the copies fit
    within the cache's limit.

    Args:
        layers: Number of layers.
        heads: Number of key and value heads per layer.
        head_dim: Dimensions per head.
        dtype: Precision.
        device: Device.
        block: Number of positions that are stored, and grow, together.

    Attributes:
        keys: One tensor per layer, ``(rows, heads, positions, head_dim)``; with blocks, ``(rows, heads, blocks,
            block * head_dim)``.
        values: Likewise.
    """

    def __init__(
        self, layers: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, block: int = 1
    ) -> None:
        self._layers, self._heads, self._head_dim, self._block = layers, heads, head_dim * block, block
        self._dtype, self._device = dtype, device
        self._blocks = [torch.empty(0), torch.empty(0)]
        self.keys: Sequence[torch.Tensor] = ()
        self.values: Sequence[torch.Tensor] = ()

    @property
    def positions(self) -> int:
        """Number of positions, used or free."""
        return self.keys[0].shape[2] * self._block

    def release(self) -> None:
        """Releases a large cache, or the content of a small one."""
        self.keys, self.values = (), ()

    def allocate(self, rows: int, length: int) -> None:
        """Makes room for ``length`` positions; their content is undefined."""
        self.release()
        self._replace(rows, -(-length // self._block), lambda old, new: None)

    def select(self, rows: torch.Tensor, length: int) -> None:
        """Replaces the cache's rows by ``rows``, which may repeat or be omitted, and keeps ``length`` positions."""
        blocks = -(-length // self._block)

        def select(old: torch.Tensor, new: torch.Tensor) -> None:
            torch.index_select(old[..., :blocks, :], -4, rows, out=new[..., :blocks, :])

        self._replace(len(rows), blocks, select)

    def grow(self) -> None:
        """Makes room for more positions."""
        blocks = self.keys[0].shape[2]
        self._replace(len(self.keys[0]), blocks, lambda old, new: new[..., :blocks, :].copy_(old))

    def _replace(self, rows: int, blocks: int, fill: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        """Replaces the cache's tensors, if there are any; ``fill`` copies an old tensor to a new one."""
        count, old = 2 * self._layers, [*self.keys, *self.values][::-1]
        self.release()
        shape = (rows, self._heads, blocks + max(16 // self._block, blocks), self._head_dim)
        kept = self._kept(count * math.prod(shape))
        if kept is None:
            shape = (rows, self._heads, blocks + CACHE_STEP_POSITIONS // self._block, self._head_dim)
        new: list[torch.Tensor] = []
        for index in range(count):
            new.append(self._empty(shape) if kept is None else kept.view(count, *shape)[index])
            if old:
                fill(old.pop(), new[-1])
        self.keys, self.values = new[: self._layers], new[self._layers :]

    def _kept(self, numbers: int) -> torch.Tensor | None:
        """Returns memory from the permanent block that is not in use; None, without permanent blocks, for more."""
        if numbers * self._dtype.itemsize > KEPT_BLOCK_BYTES:
            self._blocks = [torch.empty(0), torch.empty(0)]
            return None
        block = self._blocks.pop(0)
        if len(block) < numbers:
            block = self._empty((numbers * 5 // 4,))
        self._blocks.append(block)
        return block[:numbers]

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, device=self._device, dtype=self._dtype)
