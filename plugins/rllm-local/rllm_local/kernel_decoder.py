"""The forward pass of the sampler, with the kernels of extra ``rllm-local[fast]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from rllm_local import fast
from rllm_local.cache import Cache
from rllm_local.fast import LANES
from rllm_local.fused import FusedDecoder, _Layer, _Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class KernelDecoder(FusedDecoder):
    """Decodes with `rllm_local.kernels`: everything but the products with weights.

    Keys are stored in blocks of 16 positions, ``(head_dim, 16)``. Between two products, numbers stay in memory that a
    tensor and an array share, since a small model takes less time to compute than to allocate and to convert.
    """

    title: ClassVar[str] = "fused decoder with the kernels of rllm-local[fast]"

    _rows = 0
    _cached: Sequence[torch.Tensor] | None = None
    _turned: torch.Tensor | None = None

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, **options: Any) -> None:
        self._numbers: dict[str, torch.Tensor] = {}
        self._arrays: dict[str, npt.NDArray[np.float32]] = {}
        super().__init__(model, dtype, **options)

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

    def use(self, weights: _Weights) -> None:
        """See `Decoder`."""
        super().use(weights)
        empty = np.empty(0, np.float32)
        self._gains = [empty if layer.gain is None else fast.flat(layer.gain) for layer in self._layers]

    def _keep_prompts(self, index: int, chunk: slice, k: torch.Tensor, v: torch.Tensor) -> None:
        tokens = k.shape[2]
        padded = F.pad(k, (0, 0, 0, -tokens % LANES))
        blocks = padded.reshape(*k.shape[:2], -1, LANES, k.shape[3]).transpose(-1, -2)
        keys, values = self._cache.keys[index][chunk], self._cache.values[index][chunk]
        keys.view(len(keys), self._kv_heads, -1, self._head_dim, LANES)[:, :, : blocks.shape[2]] = blocks
        values.view(len(values), self._kv_heads, -1, self._head_dim)[:, :, :tokens] = v

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = len(tokens)
        if rows != self._rows:
            layer, self._rows = self._layers[0], rows
            widths = {"x": layer.qkv.shape[1], "normalised": layer.qkv.shape[1], "projected": layer.qkv.shape[0]}
            widths |= {"mixed": len(layer.out), "gate_up": len(layer.gate_up), "activated": len(layer.down)}
            self._numbers = {name: torch.empty(rows, width) for name, width in widths.items()}
            self._arrays = {name: fast.flat(numbers) for name, numbers in self._numbers.items()}
        if self._cached is not self._cache.keys:
            self._cached = self._cache.keys
            self._pairs = [tuple(map(fast.flat, pair)) for pair in zip(self._cached, self._cache.values, strict=True)]
        if self._turned is not self._rotations:
            self._turned = self._rotations
            self._angles = fast.flat(torch.view_as_real(self._turned))
        self._starts = np.zeros(rows, np.int64) if self._padding is None else self._padding.numpy()
        return torch.index_select(self._embedding, 0, tokens, out=self._numbers["x"])

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        if x is not self._numbers.get("x"):
            return super()._normalised(x)
        fast.loaded().normalise(self._arrays["x"], x.shape[1], self._epsilon, self._arrays["normalised"])
        return self._numbers["normalised"]

    def _read(self, index: int, layer: _Layer, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        kernels, numbers, arrays, heads = fast.loaded(), self._numbers, self._arrays, self._kv_heads
        torch.mm(self._normalised(x), layer.qkv.t(), out=numbers["projected"])
        if layer.qkv_bias is not None:
            numbers["projected"].add_(layer.qkv_bias)
        norms = self._gains[index], self._epsilon
        cached = *self._pairs[index], self._starts
        shape = heads, self._heads // heads, self._head_dim, self._length
        kernels.decode(arrays["projected"], *norms, self._angles, *cached, arrays["mixed"], *shape)
        x.addmm_(numbers["mixed"], layer.out)
        if layer.out_bias is not None:
            x.add_(layer.out_bias)
        torch.mm(self._normalised(x), layer.gate_up.t(), out=numbers["gate_up"])
        if layer.gate_up_bias is not None:
            numbers["gate_up"].add_(layer.gate_up_bias)
        kernels.activate(arrays["gate_up"], len(layer.down), arrays["activated"])
        x.addmm_(numbers["activated"], layer.down)
        return x if layer.down_bias is None else x.add_(layer.down_bias)
