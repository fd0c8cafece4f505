"""The forward pass of the sampler for dense Llama-like models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from rllm_core.memory.transformer import FLOAT32
from rllm_local.cache import Cache
from rllm_local.decoders import Decoder
from rllm_local.memory import FUSED_MODEL_TYPES, KEPT_BLOCK_BYTES, LARGE_VOCABULARY
from rllm_local.vision import Placement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FUSED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
FUSED_TOLERANCE = 1e-4
# For log-probabilities, as a share of the logits' standard deviation: rounding is relative.
HALF_TOLERANCE = 0.1
PREFILL_TOKENS = 1024
# With this many rows, oneDNN multiplies parts of a head by the inputs faster than the inputs by the head.
TRANSPOSED_ROWS, TRANSPOSED_TOKENS = 16, 4096


class _Layer(NamedTuple):
    """The fused weights of one layer."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    gain: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class _Weights(NamedTuple):
    """The fused weights of a model."""

    embedding: torch.Tensor
    head: torch.Tensor
    head_gain: torch.Tensor
    layers: list[_Layer]


class FusedDecoder:
    """Decodes dense Llama, Qwen2 and Qwen3 models with few, large operations on a snapshot of their weights.

    One product computes q, k and v, and another computes gate and up. Gains of a layer's norms and the attention scale
    are folded into the weights that follow them; the gain of the last norm is not, so that the head needs no copy. The
    two halves that rotary embeddings pair are interleaved, so that rotating queries and keys is one complex product.
    Adapters are merged.

    In bfloat16, sums over layers and attention scores have the same precision as in training.

    Args:
        model: Model in training.
        dtype: Precision of the products.
        shares_weights: Whether nothing is sampled while weights change, so that embedding and head need no copy.
    """

    title: ClassVar[str] = "fused decoder"
    probe_steps: ClassVar[int] = 1

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, *, shares_weights: bool = False) -> None:
        config: Any = model.config
        inner: Any = model.get_decoder()  # type: ignore[no-untyped-call]
        self._dtype = dtype
        self._sum_dtype: torch.dtype = inner.embed_tokens.weight.dtype
        self._shares_weights = shares_weights
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._epsilon: float = config.rms_norm_eps
        self._rotary = copy.deepcopy(inner.rotary_emb)
        self._rotations = torch.empty(0)
        self._kept_logits = torch.empty(0)
        self._length = 0
        self._padding: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self.use(self.copied(model))
        device = self._embedding.device
        self._cache = self._new_cache(config.num_hidden_layers, device)

    def _new_cache(self, layers: int, device: torch.device) -> Cache:
        return Cache(layers, self._kv_heads, self._head_dim, self._dtype, device)

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        """Returns whether this class supports the architecture; `agrees_with` then checks the numbers."""
        config: Any = model.config
        rope = getattr(config, "rope_parameters", None) or {}
        return (
            config.model_type in FUSED_MODEL_TYPES
            and config.hidden_act == "silu"
            and rope.get("rope_type", "default") in FUSED_ROPE_TYPES
            and all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
            and not hasattr(model.get_input_embeddings(), "base_layer")  # adapters, which start as zero
        )

    def agrees_with(self, reference: Decoder, vocabulary_size: int) -> bool:
        """Returns whether both give the same logits on a probe, for padded prefill and for decoding."""
        device = self._embedding.device
        prompts = torch.arange(10, device=device).view(2, 5) * 7919 % vocabulary_size
        padding = torch.tensor([0, 2], device=device)
        results: list[torch.Tensor] = []
        decoders: tuple[Decoder, ...] = (self, reference)
        for decoder in decoders:
            first = decoder.prefill(prompts, padding)
            decoder.select(torch.tensor([1, 0, 1], device=device))
            steps = [decoder.step(prompts[0, :3]).clone() for _ in range(self.probe_steps)]
            results.append(torch.cat([first, *steps]))
        mine, theirs = results
        if self._dtype == torch.float32 and (device.type == "cpu" or torch.get_float32_matmul_precision() == "highest"):
            return torch.allclose(mine, theirs, atol=FUSED_TOLERANCE, rtol=FUSED_TOLERANCE)
        errors = (mine.log_softmax(-1) - theirs.log_softmax(-1)).abs()
        return bool((errors <= HALF_TOLERANCE * theirs.std(-1, keepdim=True)).all())

    @torch.no_grad()
    def copied(self, model: PreTrainedModel, into: _Weights | None = None) -> _Weights:
        """See `Decoder`. Each layer replaces its predecessor, so two full sets of layers never exist."""
        decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
        module: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        merged = _weight(module)
        embedding = self._held(decoder.embed_tokens.weight, into and into.embedding, decoder.embed_tokens.weight.dtype)
        if merged.data_ptr() == decoder.embed_tokens.weight.data_ptr() and embedding.dtype == self._dtype:
            head = embedding
        elif hasattr(module, "base_layer"):
            head = merged.to(self._dtype)
        else:
            head = self._held(module.weight, into and into.head, self._dtype)
        layers = [] if into is None else into.layers
        for index, layer in enumerate(decoder.layers):
            layers[index : index + 1] = [self._fuse(layer)]
        return _Weights(embedding, head, decoder.norm.weight.detach().clone(), layers)

    def _held(self, weight: torch.Tensor, old: torch.Tensor | None, read_as: torch.dtype) -> torch.Tensor:
        """Returns the weight itself if it cannot change while this decoder reads it, else a copy."""
        if weight.dtype == read_as and (self._shares_weights or not weight.requires_grad):
            return weight.detach()
        return weight.detach().to(self._dtype, copy=True) if old is None else old.copy_(weight)

    @property
    def weights(self) -> _Weights:
        """See `Decoder`."""
        return _Weights(self._embedding, self._head, self._head_gain, self._layers)

    def use(self, weights: _Weights) -> None:
        """See `Decoder`."""
        self._embedding, self._head, self._head_gain, self._layers = weights

    def _folded(self, weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return (weight * gain).to(self._dtype)

    def _fuse(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        rotated, scale = self._heads + self._kv_heads, self._head_dim**-0.5
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv = self._interleaved(torch.cat([_weight(module) for module in projections]), rotated)
        bias, gain = None, None
        if attention.q_proj.bias is not None:
            bias = self._interleaved(torch.cat([module.bias for module in projections]), rotated)
        if hasattr(attention, "q_norm"):
            query_gain = (attention.q_norm.weight * scale).expand(self._heads, -1)
            gain = torch.cat([query_gain, attention.k_norm.weight.expand(self._kv_heads, -1)])
            gain = self._interleaved(gain.reshape(-1), rotated).view(1, rotated, self._head_dim)
        else:
            qkv[: self._heads * self._head_dim] *= scale
            if bias is not None:
                bias[: self._heads * self._head_dim] *= scale
        up_bias = None
        if mlp.up_proj.bias is not None:
            up_bias = torch.cat([mlp.gate_proj.bias, mlp.up_proj.bias])
        gate_up = torch.cat([_weight(mlp.gate_proj), _weight(mlp.up_proj)])

        def copied(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else part.detach().to(self._dtype, copy=True)

        return _Layer(
            qkv=self._folded(qkv, layer.input_layernorm.weight),
            qkv_bias=copied(bias),
            gain=None if gain is None else gain.float(),
            out=_weight(attention.o_proj).t().to(self._dtype, copy=True),
            out_bias=copied(attention.o_proj.bias),
            gate_up=self._folded(gate_up, layer.post_attention_layernorm.weight),
            gate_up_bias=copied(up_bias),
            down=_weight(mlp.down_proj).t().to(self._dtype, copy=True),
            down_bias=copied(mlp.down_proj.bias),
        )

    def _interleaved(self, weight: torch.Tensor, rotated_heads: int) -> torch.Tensor:
        """Reorders ``weight`` so that dimensions i and i + head_dim / 2 of each rotated head are adjacent."""
        cut = rotated_heads * self._head_dim
        heads = weight[:cut].view(rotated_heads, 2, self._head_dim // 2, *weight.shape[1:])
        return torch.cat([heads.transpose(1, 2).reshape(cut, *weight.shape[1:]), weight[cut:]])

    def prefill(self, prompts: torch.Tensor, padding: torch.Tensor, media: Sequence[Placement] = ()) -> torch.Tensor:
        """See `Decoder`."""
        assert not media
        return self.logits(prompts, padding, 1)[:, 0]

    def logits(self, prompts: torch.Tensor, padding: torch.Tensor, count: int) -> torch.Tensor:
        """See `Decoder`."""
        rows, tokens = prompts.shape
        self._length, self._padding, self._bias = tokens, None, None
        if bool(padding.any()):
            self._padding = padding
            hidden = torch.arange(tokens, device=prompts.device) < padding[:, None]
            self._bias = torch.zeros(rows, 1, 1, tokens, device=prompts.device, dtype=self._dtype)
            self._bias.masked_fill_(hidden[:, None, None], float("-inf"))
        self._grow_rotations(tokens)
        self._cache.allocate(rows, tokens)
        per_chunk = max(1, PREFILL_TOKENS // tokens)
        if per_chunk >= rows:
            return self._prefill(prompts, slice(0, rows), count)
        logits = torch.empty(rows, count, len(self._head), device=prompts.device)
        for start in range(0, rows, per_chunk):
            chunk = slice(start, start + per_chunk)
            logits[chunk] = self._prefill(prompts[chunk], chunk, count)
        return logits

    def _prefill(self, prompts: torch.Tensor, chunk: slice, count: int) -> torch.Tensor:
        rows, tokens = prompts.shape
        group, dim = self._heads // self._kv_heads, self._head_dim
        bias = torch.full((tokens, tokens), float("-inf"), device=prompts.device, dtype=self._dtype).triu_(1)
        if self._padding is None or self._bias is None:
            rotations = self._rotations[:tokens].repeat(rows, 1)[:, None]
        else:
            positions = torch.arange(tokens, device=prompts.device) - self._padding[chunk, None]
            rotations = self._rotations[positions.clamp_(min=0)].view(rows * tokens, 1, -1)
            bias = bias + self._bias[chunk]
            bias.diagonal(dim1=-2, dim2=-1).zero_()  # Padding sees itself, since an empty softmax is undefined.
        x = self._embedding[prompts.reshape(-1)].to(self._sum_dtype)
        for index, layer in enumerate(self._layers):
            q, k, v = self._queries_keys_values(x, layer, rotations)
            q = q.view(rows, tokens, self._kv_heads, group, dim).permute(0, 2, 3, 1, 4)
            k = k.view(rows, tokens, self._kv_heads, dim).transpose(1, 2)
            v = v.view(rows, tokens, self._kv_heads, dim).transpose(1, 2)
            self._keep_prompts(index, chunk, k, v)
            if self._dtype == torch.float32:
                scores = torch.matmul(q.reshape(rows, self._kv_heads, group * tokens, dim), k.transpose(-1, -2))
                scores = scores.view(rows, self._heads, tokens, tokens) + bias
                mixed = torch.matmul(scores.softmax(-1).view(rows, self._kv_heads, group * tokens, tokens), v)
                mixed = mixed.view(rows, self._heads, tokens, dim)
            else:
                q = q.reshape(rows, self._heads, tokens, dim)
                mixed = F.scaled_dot_product_attention(q, k, v, bias, scale=1.0, enable_gqa=group > 1)
            mixed = mixed.transpose(1, 2).reshape(rows * tokens, -1)
            x = self._mlp(x, mixed, layer)
        return self._logits(x.view(rows, tokens, -1)[:, tokens - count :])

    def _keep_prompts(self, index: int, chunk: slice, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes keys and values of prompts, ``(rows, kv heads, tokens, head_dim)``, to the cache of a layer."""
        self._cache.keys[index][chunk, :, : k.shape[2]] = k
        self._cache.values[index][chunk, :, : k.shape[2]] = v

    def select(self, rows: torch.Tensor) -> None:
        """See `Decoder`."""
        self._cache.select(rows, self._length)
        if self._padding is not None and self._bias is not None:
            self._padding, self._bias = self._padding[rows], self._bias[rows]

    def release(self) -> None:
        """See `Decoder`."""
        self._cache.release()

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Decoder`."""
        rows, length = len(tokens), self._length
        self._make_room()
        if self._padding is None or self._bias is None:
            rotations = self._rotations[length]
        else:
            rotations = self._rotations[length - self._padding][:, None]
            self._bias = F.pad(self._bias, (0, length + 1 - self._bias.shape[-1]))
        self._length = length + 1
        x = self._embedded(tokens)
        for index, layer in enumerate(self._layers):
            x = self._read(index, layer, x, rotations)
        numbers = rows * len(self._head)
        if len(self._head) < LARGE_VOCABULARY or numbers * FLOAT32 > KEPT_BLOCK_BYTES or x.is_cuda:
            return self._logits(x)
        if len(self._kept_logits) < numbers:
            self._kept_logits = torch.empty(numbers)
        return self._logits_into(x, self._kept_logits[:numbers].view(rows, -1))

    def _make_room(self) -> None:
        """Ensures that the cache and the rotations have room for one more position."""
        if self._length == self._cache.positions:
            self._cache.grow()
        self._grow_rotations(self._length + 1)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._embedding[tokens].to(self._sum_dtype)

    def _read(self, index: int, layer: _Layer, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Appends one position to the cache of a layer, and returns the layer's output at it, ``(rows, hidden)``."""
        q, k, v = self._queries_keys_values(x, layer, rotations)
        keys, values = self._cache.keys[index], self._cache.values[index]
        keys[:, :, self._length - 1] = k
        values[:, :, self._length - 1] = v
        seen, read = keys[:, :, : self._length], values[:, :, : self._length]
        return self._mlp(x, self._attended(q, seen, read, self._bias), layer)

    def _attended(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the attention's output, ``(rows, heads * head_dim)``, for queries ``(rows, heads, head_dim)``."""
        q = q.view(len(q), self._kv_heads, -1, self._head_dim)
        if self._dtype == torch.float32:
            scores = torch.matmul(q, keys.transpose(-1, -2))
            if bias is not None:
                scores = scores + bias
            mixed = torch.matmul(scores.softmax(-1), values)
        else:
            mixed = F.scaled_dot_product_attention(q, keys, values, bias, scale=1.0)
        return mixed.reshape(len(q), -1)

    def _queries_keys_values(
        self, x: torch.Tensor, layer: _Layer, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns rotated queries ``(positions, heads, head_dim)``, rotated keys, and values, of normalized ``x``."""
        projected = F.linear(self._normalised(x).to(self._dtype), layer.qkv, layer.qkv_bias).view(
            len(x), -1, self._head_dim
        )
        rotated = self._heads + self._kv_heads
        turning = projected[:, :rotated]
        if layer.gain is not None:
            turning = self._normalised(turning.float()) * layer.gain
        pairs = torch.view_as_complex(turning.float().view(len(x), rotated, -1, 2))
        turned = torch.view_as_real(pairs * rotations).view(len(x), rotated, self._head_dim).to(self._dtype)
        return turned[:, : self._heads], turned[:, self._heads :], projected[:, rotated:]

    def _mlp(self, x: torch.Tensor, mixed: torch.Tensor, layer: _Layer) -> torch.Tensor:
        x = self._sum(x, mixed, layer.out)
        if layer.out_bias is not None:
            x = x + layer.out_bias
        gate, value = F.linear(self._normalised(x).to(self._dtype), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        x = self._sum(x, F.silu(gate) * value, layer.down)
        return x if layer.down_bias is None else x + layer.down_bias

    @staticmethod
    def _sum(x: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.addmm(x, inputs, weight) if x.dtype == weight.dtype else x + torch.mm(inputs, weight)

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self._epsilon)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self._head_inputs(x), self._head).float()

    def _head_inputs(self, x: torch.Tensor) -> torch.Tensor:
        return (self._normalised(x) * self._head_gain).to(self._dtype)

    def _logits_into(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Computes logits in existing memory, because faulting in new memory takes as long as filling it."""
        inputs = self._head_inputs(x)
        if self._dtype != torch.float32:
            return logits.copy_(F.linear(inputs, self._head))
        if len(x) < TRANSPOSED_ROWS or torch.get_float32_matmul_precision() == "highest":
            return torch.mm(inputs, self._head.t(), out=logits)
        parts = zip(torch.split(self._head, TRANSPOSED_TOKENS), torch.split(logits, TRANSPOSED_TOKENS, 1), strict=True)
        for part, into in parts:
            into.copy_(torch.mm(part, inputs.t()).t())
        return logits

    def _grow_rotations(self, positions: int) -> None:
        """Extends the table of ``cos + i sin``, ``(positions, head_dim / 2)``, to at least ``positions``."""
        if positions <= len(self._rotations):
            return
        device = self._embedding.device
        table = torch.arange(max(positions, 2 * len(self._rotations), 256), device=device)[None]
        cos, sin = self._rotary(torch.empty(0, device=device), table)
        half = self._head_dim // 2
        self._rotations = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())


def _weight(module: Any) -> torch.Tensor:
    """Returns the effective weight of a linear layer, with active adapters merged."""
    if not hasattr(module, "base_layer"):
        return module.weight.detach()  # type: ignore[no-any-return]
    weight = module.base_layer.weight.detach()
    for name in module.active_adapters:
        weight = weight + module.get_delta_weight(name)
    return weight  # type: ignore[no-any-return]
