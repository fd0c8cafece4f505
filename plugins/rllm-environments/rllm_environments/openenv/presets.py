"""Run files for workflow ``openenv``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm_core.run_file import Preset
from rllm_environments.instruction_tuned import INSTRUCTION_TUNED, has_model


def run_file(given: Mapping[str, Any]) -> Preset:
    """Returns settings for the user's model, without assumptions about the environment."""
    if has_model(given):
        return Preset(INSTRUCTION_TUNED, "settings for a small instruction-tuned model")
    optimizer = {**INSTRUCTION_TUNED["optimizer"], "learning_rate": 1e-3}
    tables = {**INSTRUCTION_TUNED, "rollout": {"max_response_tokens": 32}, "optimizer": optimizer}
    return Preset(tables, "settings for the starter model, since model.path is not set; not known to learn")
