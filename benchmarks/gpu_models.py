"""Models of real shapes with random weights, and a tokenizer for them, made on the spot: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    # Qwen2.5-0.5B, whose embedding and head are one matrix.
    "0.5b": QWEN2
    | {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    # Separate embedding and head, each above a small sync bucket: loaded through meta tensors, and sent directly.
    "untied": QWEN2
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "vocab_size": 152064,
    },
    # Qwen2.5-7B.
    "7b": QWEN2
    | {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    },
    # Qwen3-30B-A3B with 4 of its 48 layers.
    "experts": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
}
MAX_POSITIONS = 4096
END, PADDING = "<|im_end|>", "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def describe(folder: Path, name: str) -> Path:
    """Writes the configuration and the tokenizer of a shape, which a dry run needs, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(SHAPES[name]["vocab_size"])
    tokenizer.save_pretrained(folder)
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    positions = {"max_position_embeddings": MAX_POSITIONS, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
    config = {"hidden_act": "silu", "dtype": "bfloat16", **positions, **tokens, **SHAPES[name]}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return folder


def make_model(folder: Path, name: str, device: str) -> Path:
    """Writes a model with random weights in bfloat16, made on ``device``, and returns its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    describe(folder, name)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def make_tokenizer(vocabulary: int) -> Any:
    """Returns a byte-level tokenizer with as many tokens as the model has ids, so that every sampled id has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PADDING, "<|im_start|>", END]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"w{number}" for number in range(vocabulary - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PADDING,
        additional_special_tokens=special,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast
