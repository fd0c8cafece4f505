"""Tested run files for workflow ``gymnasium``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm_core.run_file import Preset
from rllm_environments.instruction_tuned import INSTRUCTION_TUNED, has_model

DEFAULT = "FrozenLake-v1"

_STARTER: dict[str, Any] = {
    "training": {"steps": 110, "groups_per_step": 8, "rollouts_per_group": 16},
    "rollout": {"max_response_tokens": 4},
    "algorithm": {
        "name": "return_to_go",
        "entropy_coefficient": 0.01,
        "entropy_coefficient_final": 0.0,
    },
    "optimizer": {
        "learning_rate": 1e-3,
        "schedule": "linear",
        "warmup_steps": 5,
        "final_learning_rate_fraction": 0.1,
    },
}

# Differences from `_STARTER`.
_LEARNED: Mapping[str, dict[str, Any]] = {
    "FrozenLake-v1": {"gymnasium": {"options": {"is_slippery": False}, "max_turns": 12}},
}


def run_file(given: Mapping[str, Any]) -> Preset:
    """Returns settings for the user's model and environment."""
    section = given.get("gymnasium")
    environment = section.get("environment", DEFAULT) if isinstance(section, Mapping) else DEFAULT
    if has_model(given):
        return Preset(INSTRUCTION_TUNED, "settings for a small instruction-tuned model")
    learned = _LEARNED.get(environment, {})
    own = {"instructions": False, **learned.get("gymnasium", {})}
    reason = "it learns with these" if learned else "not known to learn"
    return Preset(
        {**_STARTER, **learned, "gymnasium": own},
        f"settings for the starter model, since model.path is not set; {environment}: {reason}",
    )
