"""Checkpoints: an ordinary Hugging Face folder with the optimizer state added. No pickle is used."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rllm_core.errors import ConfigError, RunError
from rllm_local.config import LoRAConfig
from rllm_local.model import one_model_at_a_time

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

OPTIMIZER_FILE = "optimizer.safetensors"


def save(
    directory: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, torch.nn.Parameter],
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
) -> None:
    """Writes weights (or adapters), tokenizer or processor for transformers, and the optimizer's moments.

    Raises:
        OSError: If the disk rejects a write.
    """
    moments: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state[parameter].items():
            moments[f"{key}.{name}"] = value.contiguous()
    try:
        # With adapters of the embedding or head, peft saves that, too, and warns.
        with one_model_at_a_time(), warnings.catch_warnings(action="ignore", category=UserWarning):
            model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        save_file(moments, directory / OPTIMIZER_FILE)
    except SafetensorError as error:  # is no OSError, so a full disk would look like a bug
        raise OSError(str(error)) from error


def load(
    directory: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, torch.nn.Parameter],
) -> None:
    """Restores a checkpoint written by `save`, bit for bit.

    Raises:
        RunError: If the weights belong to another model.
    """
    load_weights(directory, model, parameters)
    state: dict[str, Any] = load_file(directory / OPTIMIZER_FILE)
    optimizer.state.clear()
    for name, parameter in parameters.items():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            saved = state.get(f"{key}.{name}")
            if saved is not None:
                optimizer.state[parameter][key] = saved.to(parameter.device)


def load_weights(directory: Path, model: PreTrainedModel, parameters: dict[str, torch.nn.Parameter]) -> None:
    """Restores only the weights, or adapters, of a checkpoint.

    Raises:
        RunError: If the weights belong to another model.
    """
    own = _weights(directory, model, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            saved = own.get(name)
            if saved is None:
                saved = own.get(_in_peft(name))
            if saved is None or saved.shape != parameter.shape:
                raise RunError(f"checkpoint {directory} is from another model: {name} is missing or has another shape")
            parameter.copy_(saved)


def check_adapters(
    directory: Path,
    model: PreTrainedModel,
    parameters: dict[str, torch.nn.Parameter],
    lora: LoRAConfig | None,
    base: str,
) -> None:
    """Checks that another run's adapters, or their absence, match those that this run trains.

    Args:
        directory: Checkpoint of the other run.
        model: Model of this run.
        parameters: Trained parameters of the model.
        lora: Adapters of this run, or None if it trains all weights.
        base: Folder or Hugging Face model ID from which the model was loaded.

    Raises:
        ConfigError: If the adapters do not match.
    """
    file = directory / "adapter_config.json"
    saved: dict[str, Any] | None = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    before = "all weights" if saved is None else f"adapters of rank {saved['r']} and alpha {saved['lora_alpha']:g}"
    now = "all weights" if lora is None else f"adapters of rank {lora.rank} and alpha {lora.alpha:g}"
    is_same = before == now
    if is_same and saved is not None:
        source = str(saved.get("base_model_name_or_path") or base)
        # Weights without adapters are those that `save` mentions.
        theirs = {name for name in _weights(directory, model, parameters) if ".lora_" in name}
        ours = set(map(_in_peft, parameters))
        if Path(source).name != Path(base).name:  # a cached model has the same name on every machine
            before, now, is_same = f"{before} for {source}", f"{now} for {base}", False
        elif theirs != ours:
            before, now, is_same = f"{before} in {_modules(theirs)}", f"{now} in {_modules(ours)}", False
    if not is_same:
        raise ConfigError(
            f"training.init_from: the checkpoint has {before}, and this run trains {now}; set local.lora and the model "
            "alike, or export the trained model (rllm-core export-model) and set model.path to it"
        )


def check_vocabulary(directory: Path, starter: str) -> None:
    """Checks that a checkpoint's starter model has the same vocabulary; workflows may have their own starter models.

    Args:
        directory: The checkpoint.
        starter: Folder of the starter model of this run.

    Raises:
        ConfigError: If the vocabularies differ.
    """
    theirs, ours = (json.loads((folder / "tokenizer.json").read_text()) for folder in (directory, Path(starter)))
    if theirs["model"]["vocab"] != ours["model"]["vocab"]:
        raise ConfigError(
            f"checkpoint {directory} is of another starter model: the conversations of its workflow had other words; "
            "export the trained model (rllm-core export-model) and set model.path to it"
        )


def _in_peft(name: str) -> str:
    """Returns the name under which peft saves a weight of an adapter: without the adapter's own name."""
    return name.replace(".default.", ".").removesuffix(".default")


def _modules(names: Collection[str]) -> str:
    """Returns the kinds of modules with adapters, and the total number of modules."""
    modules = {name.partition(".lora_")[0] for name in names}
    return f"{len(modules)} modules ({', '.join(sorted({name.rpartition('.')[2] for name in modules}))})"


def _weights(
    directory: Path, model: PreTrainedModel, parameters: dict[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Returns the weights or adapters in a folder, by their names in ``model``."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        if file.name != OPTIMIZER_FILE:
            weights |= load_file(file)
    own = {name.removeprefix("base_model.model."): value for name, value in weights.items()}
    if (directory / "adapter_config.json").is_file() or own.keys() >= parameters.keys():
        return own
    # Some folders use parameter names from older model code, which only transformers can map.
    model_class: Any = type(model)
    with one_model_at_a_time():
        renamed, found = model_class.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    missing = found["missing_keys"]
    return {name: value for name, value in renamed.state_dict().items() if name not in missing}
