"""The forward pass of the sampler, with attention from extra ``rllm-local[fast]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from rllm_local import fast
from rllm_local.cache import Cache
from rllm_local.fast import LANES
from rllm_local.fused import FusedDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class KernelDecoder(FusedDecoder):
    """Decodes with `rllm_local.kernels`; stores keys in blocks of 16 positions, ``(head_dim, 16)``."""

    title: ClassVar[str] = "fused decoder with the kernels of rllm-local[fast]"

    @staticmethod
    def supports(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> bool:
        """Returns whether the kernels are installed, and support the model and the precision of its products."""
        config: Any = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        probe = torch.empty(0, head_dim, dtype=dtype, device=model.device)
        return FusedDecoder.supports(model) and fast.fits(probe)

    def _new_cache(self, layers: int, device: torch.device) -> Cache:
        return Cache(layers, self._kv_heads, self._head_dim, self._dtype, device, block=LANES)

    def _blocks(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.view(len(keys), self._kv_heads, -1, self._head_dim, LANES)

    def _keep_prompts(self, index: int, chunk: slice, k: torch.Tensor, v: torch.Tensor) -> None:
        tokens = k.shape[2]
        padded = F.pad(k, (0, 0, 0, -tokens % LANES))
        blocks = padded.reshape(*k.shape[:2], -1, LANES, k.shape[3]).transpose(-1, -2)
        self._blocks(self._cache.keys[index][chunk])[:, :, : blocks.shape[2]] = blocks
        values = self._cache.values[index][chunk]
        values.view(len(values), self._kv_heads, -1, self._head_dim)[:, :, :tokens] = v

    def _attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows, position = len(q), self._length - 1
        keys, values = self._cache.keys[index], self._cache.values[index]
        self._blocks(keys)[:, :, position // LANES, :, position % LANES] = k
        values.view(rows, self._kv_heads, -1, self._head_dim)[:, :, position] = v
        padding = np.zeros(rows, np.int64) if self._padding is None else self._padding.numpy()
        mixed = torch.empty(rows, self._heads * self._head_dim)
        arrays = fast.flat(q.contiguous()), fast.flat(keys), fast.flat(values), padding, fast.flat(mixed)
        groups = self._heads // self._kv_heads
        fast.loaded().decode(*arrays, self._kv_heads, groups, self._head_dim, self._length)
        return mixed
