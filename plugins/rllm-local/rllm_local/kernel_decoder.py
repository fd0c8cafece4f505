"""The forward pass of the sampler, with the kernels of extra ``rllm-local[fast]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from rllm_local import fast
from rllm_local.cache import Cache
from rllm_local.fast import LANES
from rllm_local.fused import FusedDecoder, _Layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_GAINS = np.empty(0, np.float32)


class KernelDecoder(FusedDecoder):
    """Decodes with `rllm_local.kernels`: everything but the products with weights.

    Keys are stored in blocks of 16 positions, ``(head_dim, 16)``.
    """

    title: ClassVar[str] = "fused decoder with the kernels of rllm-local[fast]"

    @staticmethod
    def supports(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> bool:
        """Returns whether the kernels are installed, and support the model and the precision of its products."""
        config: Any = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        probe = torch.empty(0, head_dim, dtype=dtype, device=model.device)
        has_blocks = config.hidden_size % LANES == 0 and config.intermediate_size % LANES == 0
        return FusedDecoder.supports(model) and has_blocks and fast.fits(probe)

    def _new_cache(self, layers: int, device: torch.device) -> Cache:
        return Cache(layers, self._kv_heads, self._head_dim, self._dtype, device, block=LANES)

    def _keep_prompts(self, index: int, chunk: slice, k: torch.Tensor, v: torch.Tensor) -> None:
        tokens = k.shape[2]
        padded = F.pad(k, (0, 0, 0, -tokens % LANES))
        blocks = padded.reshape(*k.shape[:2], -1, LANES, k.shape[3]).transpose(-1, -2)
        keys, values = self._cache.keys[index][chunk], self._cache.values[index][chunk]
        keys.view(len(keys), self._kv_heads, -1, self._head_dim, LANES)[:, :, : blocks.shape[2]] = blocks
        values.view(len(values), self._kv_heads, -1, self._head_dim)[:, :, :tokens] = v

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Decoder`; there is no attention of torch here, which is slower in the other precision."""
        with self._products_of(len(tokens)):
            return super().step(tokens)

    def _read(self, index: int, layer: _Layer, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        projected = F.linear(self._normalised(x), layer.qkv, layer.qkv_bias)
        mixed = torch.empty(len(x), self._heads * self._head_dim)
        fast.loaded().decode(
            fast.flat(projected),
            NO_GAINS if layer.gain is None else fast.flat(layer.gain),
            self._epsilon,
            fast.flat(torch.view_as_real(self._rotations)),
            fast.flat(self._cache.keys[index]),
            fast.flat(self._cache.values[index]),
            np.zeros(len(x), np.int64) if self._padding is None else self._padding.numpy(),
            fast.flat(mixed),
            self._kv_heads,
            self._heads // self._kv_heads,
            self._head_dim,
            self._length,
        )
        return self._mlp(x, mixed, layer)

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        result = torch.empty_like(x)
        fast.loaded().normalise(fast.flat(x), x.shape[-1], self._epsilon, fast.flat(result))
        return result

    def _activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        size = gate_up.shape[1] // 2
        result = torch.empty(len(gate_up), size)
        fast.loaded().activate(fast.flat(gate_up), size, fast.flat(result))
        return result
