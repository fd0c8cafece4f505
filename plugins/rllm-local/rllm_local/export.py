"""Exports a checkpoint: everything in it except the optimizer state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rllm_core.config import RunConfig
from rllm_core.errors import RunError, UserError
from rllm_local.checkpoint import OPTIMIZER_FILE
from rllm_local.config import LocalConfig
from rllm_local.starter import shared_folder, starter_model

ADAPTER_CONFIG = "adapter_config.json"


def export(checkpoint: Path, config: RunConfig, target: Path) -> None:
    """Writes the model, or its adapters, for transformers. See `rllm_core.backend`."""
    try:
        shutil.copytree(checkpoint, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(OPTIMIZER_FILE))
    except shutil.Error as error:  # has a line per file
        _, _, first = error.args[0][0]
        raise RunError(f"{checkpoint} cannot be copied to {target}: {first}") from error
    adapter = target / ADAPTER_CONFIG
    if adapter.exists():
        settings = json.loads(adapter.read_text(encoding="utf-8"))
        settings["base_model_name_or_path"] = _base_model(config, settings.get("base_model_name_or_path"))
        adapter.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _base_model(config: RunConfig, trained: str | None) -> str:
    local: LocalConfig = config.plugins.get("local") or LocalConfig()
    path = config.model.path or _starter(local.starter_seed, trained)
    # A relative path would be resolved in the folder of whoever loads the adapters.
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def _starter(seed: int, trained: str | None) -> str:
    """Returns the folder of the starter model that was trained; its name comes from its recipe."""
    if trained and Path(trained).is_dir():
        return trained
    if trained and Path(trained).name != shared_folder(seed).name:
        raise UserError(
            f"the starter model {trained} is gone, and its workflow made it; rllm-core eval --checkpoint RUN makes it "
            "again, with RLLM_CACHE_DIR as it was in the run"
        )
    return str(starter_model(seed))
