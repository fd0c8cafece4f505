"""Tested run files for workflow ``textarena``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm_core.run_file import Preset
from rllm_environments.instruction_tuned import INSTRUCTION_TUNED, has_model

_STARTER: dict[str, Any] = {
    "training": {"steps": 100, "groups_per_step": 8, "rollouts_per_group": 16},
    "rollout": {"max_response_tokens": 8},
    "algorithm": {"name": "grpo", "entropy_coefficient": 0.003, "entropy_coefficient_final": 0.0},
    "optimizer": {
        "learning_rate": 1e-3,
        "schedule": "linear",
        "warmup_steps": 5,
        "final_learning_rate_fraction": 0.1,
    },
}

DEFAULT = "TicTacToe-v0"

# By game; other games show everything except the rules.
_SECTIONS: Mapping[str, dict[str, Any]] = {"TicTacToe-v0": {"view": "actions", "seat": 0}}


def run_file(given: Mapping[str, Any]) -> Preset:
    """Returns settings for the user's model and game."""
    if has_model(given):
        return Preset(INSTRUCTION_TUNED, "settings for a small instruction-tuned model")
    section = given.get("textarena")
    user = section if isinstance(section, Mapping) else {}
    own = dict(_SECTIONS.get(user.get("environment", DEFAULT), {}))
    if user.get("opponents") == "self":
        own.pop("seat", None)
    tables = {**_STARTER, "textarena": {"instructions": False, **own}}
    return Preset(tables, "settings for the starter model, since model.path is not set")
