"""Sizes of decoder-only transformers: weights, training state, logits, activations and key-value cache.

Pure arithmetic on the model's ``config.json``. ``docs/memory.md`` lists the formulas; tests compare them with what
torch allocates. Sources are in the docstrings. Symbols: H hidden size, I intermediate size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

FLOAT32, BFLOAT16 = 4, 2  # bytes
BYTES = {"float32": FLOAT32, "bfloat16": BFLOAT16}
Compute = Literal["float32", "bfloat16", "autocast"]
"""Precision of a forward pass: of weights and activations, or bfloat16 products with float32 weights (autocast)."""
DENSE = ("llama", "mistral", "phi3", "qwen2", "qwen3")
EXPERTS = ("mixtral", "qwen3_moe")
SUPPORTED = (*DENSE, *EXPERTS)
HEAD_DIM_DEFAULTS = {"qwen3": 128, "qwen3_moe": 128}  # as in transformers' configuration classes
QUERY_KEY_NORMS = ("qwen3", "qwen3_moe")
QUERY_KEY_VALUE_BIASES = ("qwen2",)
SIZES = frozenset(("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"))


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Shape of a decoder-only transformer with gated feed-forward layers and RMS norms.

    Attributes:
        hidden: Width of the hidden states.
        heads: Query heads of a layer.
        kv_heads: Key and value heads of a layer.
        intermediate: Width of a feed-forward layer, or of one expert.
        tied: Whether embedding and output head share one matrix.
        experts: Experts of a layer; 0 for a dense model.
        active_experts: Experts per token.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    active_experts: int = 0
    has_qkv_biases: bool = False
    has_qk_norms: bool = False

    @classmethod
    def of(cls, config: dict[str, Any]) -> TransformerShape | None:
        """Returns the shape that a ``config.json`` describes.

        None for an architecture that is not in ``SUPPORTED``, and for a file without the sizes.
        """
        kind = config.get("model_type", "")
        uniform = not config.get("mlp_only_layers") and config.get("decoder_sparse_step", 1) == 1
        if kind not in SUPPORTED or config.get("attention_bias") or config.get("mlp_bias") or not uniform:
            return None
        if not config.keys() >= SIZES:
            return None
        is_sparse = kind in EXPERTS
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        experts = config.get("num_local_experts", config.get("num_experts", 0)) if is_sparse else 0
        width = config.get("moe_intermediate_size") if is_sparse else None
        return cls(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or HEAD_DIM_DEFAULTS.get(kind) or hidden // heads,
            intermediate=width or config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            experts=experts,
            active_experts=config["num_experts_per_tok"] if is_sparse else 0,
            has_qkv_biases=kind in QUERY_KEY_VALUE_BIASES,
            has_qk_norms=kind in QUERY_KEY_NORMS,
        )

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * queries + 2 * keys)
        attention += (queries + 2 * keys) * self.has_qkv_biases + 2 * self.head_dim * self.has_qk_norms
        feed_forward = 3 * self.hidden * self.intermediate * max(1, self.experts)
        return attention + feed_forward + self.experts * self.hidden + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, and of the output head if it does not share them."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All parameters; a shared matrix counts once."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden

    @property
    def largest_parameters(self) -> int:
        """Parameters of the largest weight tensor. transformers 5 stacks gate and up of all experts of a layer."""
        widest = 2 * self.experts * self.intermediate if self.experts else self.intermediate
        return max(self.vocabulary, widest) * self.hidden

    def adapter_parameters(self, rank: int, targets: Collection[str] = ()) -> int:
        """Parameters of LoRA adapters on linear layers: ``rank * (inputs + outputs)`` each.

        The stacked gate and up of experts have twice the rank, and the router has adapters too.

        Source: Hu et al. 2021, "LoRA", section 4.1.

        Args:
            rank: Rank of the adapters.
            targets: Names of the layers that get adapters. If empty, or if one is unknown, all but the head.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
        if not self.experts:
            widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.intermediate)
        expert = 2 * (self.hidden + 2 * self.intermediate) + self.intermediate + self.hidden
        unnamed = self.experts * expert + self.hidden + self.experts if self.experts else 0
        named = {target.rpartition(".")[2] for target in targets}
        if named and named <= widths.keys():
            widths, unnamed = {name: widths[name] for name in named}, 0
        return self.layers * rank * (sum(self.hidden + width for width in widths.values()) + unnamed)

    def adapter_activation_bytes(self, tokens: int, compute: Compute, *, checkpointing: bool) -> int:
        """What adapters add to `activation_bytes` for frozen weights, with peft.

        * In bfloat16, every adapter keeps its own copy of the input of its linear layer, made from one in float32.
        * peft adds the adapters of all experts of a layer to their weights before it multiplies. A layer keeps the sums
          for its backward pass; meanwhile, one layer has the product of its adapters and the gradient of that.
        """
        layers, experts = 1 if checkpointing else self.layers, 3 * self.experts * self.intermediate * self.hidden
        if compute == "float32":
            return FLOAT32 * (layers + 2) * experts
        inputs = BFLOAT16 * tokens * (3 * self.hidden + self.heads * self.head_dim)
        widest = FLOAT32 * tokens * max(self.hidden, self.intermediate)
        return layers * (inputs + BFLOAT16 * experts) + widest + 2 * FLOAT32 * experts

    def cache_bytes(self, tokens: int, size: int) -> int:
        """Key-value cache of ``tokens`` positions in numbers of ``size`` bytes: keys and values of all layers.

        Source: Kwon et al. 2023, "Efficient memory management ... with PagedAttention", section 3.
        """
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens * size

    def logits_bytes(self, tokens: int, bytes_per_logit: int) -> int:
        """Logits of ``tokens`` positions, and arrays of the same shape that the loss keeps.

        Args:
            tokens: Number of positions at once; the size of a chunk, if the head runs over chunks.
            bytes_per_logit: Sum over the copies that exist at the same time. Depends on the backend's loss.
        """
        return tokens * self.vocabulary * bytes_per_logit

    def layer_activation_bytes(self, tokens: int, compute: Compute) -> int:
        """Activations that one layer keeps for its backward pass, with fused attention, which stores no scores.

        The method is from Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models",
        section 4.1, applied to transformers' Llama, Qwen and Mixtral layers. Numbers per token:

        * two residual sums, two normalized states and two inputs of linear layers (6 H). With bfloat16 weights, a norm
          also keeps its input in float32; under autocast, the residual stream and the norms are float32;
        * rotated queries and keys, values, and the output of attention; norms of queries and keys, if there are any;
        * gate, its activation, up and their product (4 I), for every active expert, with the expert's input and output.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        size = FLOAT32 if compute == "float32" else BFLOAT16
        states = {
            "float32": 6 * FLOAT32,
            "bfloat16": 4 * BFLOAT16 + 2 * FLOAT32,
            "autocast": 4 * FLOAT32 + 5 * BFLOAT16,
        }
        attention = (2 * queries + 2 * keys) * size
        if self.has_qk_norms:
            attention += (queries + keys) * (2 * FLOAT32 if compute == "float32" else FLOAT32 + BFLOAT16)
        copies = max(1, self.active_experts)
        feed_forward = copies * 4 * self.intermediate * size + (2 * copies * self.hidden * size if self.experts else 0)
        return tokens * (states[compute] * self.hidden + attention + feed_forward)

    def activation_bytes(self, tokens: int, compute: Compute, *, checkpointing: bool) -> int:
        """Activations of a forward and backward pass over ``tokens`` positions, without the logits.

        With checkpointing (Chen et al. 2016, "Training deep nets with sublinear memory cost"), each layer keeps only
        its input, and one layer at a time is recomputed. The gradients of that layer's widest activations take memory
        at the same time.
        """
        size = BFLOAT16 if compute == "bfloat16" else FLOAT32
        layer = self.layer_activation_bytes(tokens, compute)
        gradients = tokens * size * (2 * max(1, self.active_experts) * self.intermediate + self.hidden)
        inputs = tokens * self.hidden * size
        if checkpointing:
            return (self.layers + 2) * inputs + layer + gradients
        return self.layers * layer + 2 * inputs + gradients


def adam_state_bytes(parameters: int) -> int:
    """Adam's two moments in float32. Source: Rajbhandari et al. 2020, "ZeRO", section 3.1."""
    return 2 * FLOAT32 * parameters
