"""The ``README.md`` of an exported folder. It contains no path of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rllm_core.config import RunConfig
from rllm_core.text import counted
from rllm_core.version import __version__


def model_card(
    run: Path,
    config: RunConfig,
    manifest: dict[str, Any],
    *,
    is_adapter: bool,
    validation: dict[str, Any] | None,
) -> str:
    """Returns the model card of an export.

    Args:
        run: Run folder; the card shows only its name.
        config: Run file.
        manifest: Manifest of the checkpoint.
        is_adapter: Whether the folder has adapters instead of a complete model.
        validation: Event of the last validation; None if there was none.
    """
    base = config.model.path
    is_on_hub = bool(base) and not _is_path(base)
    head = [f"base_model: {json.dumps(base)}"] if is_on_hub else []
    head += [f"library_name: {'peft' if is_adapter else 'transformers'}", "tags: [rllm-core]"]
    shown = base if is_on_hub else Path(base).name or f"default of backend {config.backend}"
    rows = {
        "run": run.resolve().name,
        "step": str(manifest["step"]),
        "weights": "adapters (PEFT)" if is_adapter else "all",
        "base model": shown,
        "workflow": config.workflow,
        "algorithm": config.algorithm.name,
        "backend": config.backend,
        "last validation": "none" if validation is None else _result(validation),
    }
    table = ["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows.items())]
    title = [f"# {rows['run']}", "", f"Trained with rllm-core {__version__}.", ""]
    return "\n".join(["---", *head, "---", "", *title, *table, ""])


def _is_path(name: str) -> bool:
    """Returns whether a model's name is a folder rather than a Hugging Face model ID (``owner/model``)."""
    return name.startswith(("/", "~", ".")) or name.count("/") != 1 or Path(name).is_dir()


def _result(validation: dict[str, Any]) -> str:
    numbers = [
        f"{name} {validation[key]:.4g}"
        for name, key in (("reward", "reward_mean"), ("solved", "solved"), ("nll per token", "nll_per_token"))
        if validation.get(key) is not None
    ]
    found = ", ".join(numbers) or "reward none"
    return f"{found} ({counted(validation['rollouts'], 'rollout')} at step {validation['step']})"
