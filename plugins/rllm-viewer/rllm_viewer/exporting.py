"""Exports the model of a run to a folder that transformers can load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError, PluginError
from rllm_core.plugins import PluginManager, Provided
from rllm_core.providers import BackendProvider
from rllm_core.run_folder import checkpoint
from rllm_viewer.merging import merge_adapters
from rllm_viewer.model_card import model_card
from rllm_viewer.runs import checkpoint_of, last_validation, resolved_run

ADAPTER_CONFIG = "adapter_config.json"


def export(run: Path, folder: Path, plugins: PluginManager, *, step: int | None, merge: bool) -> dict[str, Any]:
    """Exports a checkpoint with the backend that wrote it.

    Args:
        run: Run folder.
        folder: Output folder, new or empty. It appears once the export is complete.
        plugins: Plugins, including those of the run.
        step: Step of the checkpoint. None for the latest complete one.
        merge: Whether to merge adapters into their base model.

    Returns:
        JSON object: ``run, step, weight_version, backend, kind, base_model, folder, load``. ``kind`` is ``model`` or
        ``adapter``; ``base_model`` is None for a model; ``load`` holds the lines of Python that load it.

    Raises:
        ConfigError: If there is no such checkpoint, its backend cannot export it, or the folder is not empty or cannot
            be created.
        RunError: If the checkpoint is damaged, or the export fails.
    """
    config = resolved_run(run, plugins).config
    provided = plugins.select(BackendProvider, config.backend)
    if provided.record.export is None:
        raise ConfigError(
            f"backend {config.backend!r} ({provided.plugin.label}) does not export models: its record names no "
            "function for it"
        )
    runs_model_code = bool(getattr(config.plugins.get(config.backend), "trust_remote_code", False))
    saved = checkpoint_of(run, step)
    target = folder.resolve()
    partial = target.with_name(f"{target.name}.partial")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; choose another one")
    if partial.exists():
        raise ConfigError(
            f"{partial} exists: another export is running or was interrupted. If none is running, remove it"
        )
    manifest = checkpoint.read(saved)
    checkpoint.check_backend_files(saved, manifest)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
    try:
        _written(provided, plugins, saved, config, partial)
        if merge and (partial / ADAPTER_CONFIG).exists():
            merge_adapters(partial, trust_remote_code=runs_model_code)
        base_model = _base_model(partial)
        validation = last_validation(run, manifest["step"])
        card = model_card(run, config, manifest, is_adapter=base_model is not None, validation=validation)
        (partial / "README.md").write_text(card, encoding="utf-8")
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return {
        "run": str(run),
        "step": manifest["step"],
        "weight_version": manifest["coordinator"]["weight_version"],
        "backend": config.backend,
        "kind": "model" if base_model is None else "adapter",
        "base_model": base_model,
        "folder": str(folder),
        "load": loading_lines(target, str(folder), trust_remote_code=runs_model_code),
    }


def _written(
    provided: Provided[BackendProvider], plugins: PluginManager, saved: Path, config: RunConfig, target: Path
) -> None:
    write = plugins.load(provided, provided.record.export)
    with provided.at_work("export", write):
        write(saved / "backend", config, target)
    if not any((target / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise PluginError(
            f"backend {config.backend!r} ({provided.plugin.label}): its export wrote neither config.json nor "
            f"{ADAPTER_CONFIG}"
        )


def _base_model(folder: Path) -> str | None:
    adapter = folder / ADAPTER_CONFIG
    if not adapter.is_file():
        return None
    return str(json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"])


def loading_lines(folder: Path, shown: str, *, trust_remote_code: bool) -> list[str]:
    """Returns the Python lines that load an exported folder, with ``shown`` as its path."""
    arguments = f"{shown!r}, trust_remote_code=True" if trust_remote_code else repr(shown)
    model, tokenizer = "AutoModelForCausalLM", "AutoTokenizer"
    config = folder / "config.json"
    if config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("vision_config"):
        model, tokenizer = "AutoModelForImageTextToText", "AutoProcessor"
    return [
        f"model = transformers.{model}.from_pretrained({arguments})",
        f"tokenizer = transformers.{tokenizer}.from_pretrained({arguments})",
    ]
