"""Merges PEFT adapters into their base model. Imports torch, transformers and peft only when called."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

from rllm_core.errors import ConfigError, RunError


def merge_adapters(folder: Path, *, trust_remote_code: bool) -> None:
    """Replaces the adapters in a folder with the complete model.

    Merges in float32, and saves the weights in the precision of the base model.

    Args:
        folder: Folder of the adapters.
        trust_remote_code: Whether to run Python code that comes with the base model.

    Raises:
        ConfigError: If peft, torch or transformers is missing.
        RunError: If the base model or the adapters cannot be loaded, or the base model has no place for all adapters.
    """
    missing = [name for name in ("peft", "torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--merge needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    import torch
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
        is_vision = getattr(config, "vision_config", None) is not None
        auto_class: Any = AutoModelForImageTextToText if is_vision else AutoModelForCausalLM
        model = auto_class.from_pretrained(base, dtype=torch.float32, trust_remote_code=trust_remote_code)
        head = model.get_output_embeddings()
        is_tied = head.weight is model.get_input_embeddings().weight
        if is_tied:  # adapters may change one of them, and not the other
            model.config.tie_word_embeddings = False
            head.weight = torch.nn.Parameter(head.weight.detach().clone())
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # peft uses old names of transformers
            adapted: Any = PeftModel.from_pretrained(model, str(folder))
        layers = [module.base_layer for module in adapted.modules() if hasattr(module, "base_layer")]
        weights = [id(layer.weight) for layer in layers if hasattr(layer, "weight")]
        if len(set(weights)) < len(weights):
            raise RunError(
                f"--merge: layers of base model {base!r} share weights and have adapters of their own, which one "
                "weight cannot hold; export without --merge"
            )
        merged: Any = adapted.merge_and_unload()
        if is_tied and torch.equal(model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            model.config.tie_word_embeddings = True
            model.tie_weights()
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(f"--merge: adapters and base model {base!r} cannot be merged: {_first_line(error)}") from error
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).unlink()
    merged.to(config.dtype or torch.float32).save_pretrained(folder)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
