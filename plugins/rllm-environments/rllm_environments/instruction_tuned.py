"""Settings for a small instruction-tuned model, shared by the run files of all workflows in this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INSTRUCTION_TUNED: dict[str, dict[str, Any]] = {
    "training": {"steps": 200, "groups_per_step": 16, "rollouts_per_group": 8},
    "rollout": {"max_response_tokens": 512},
    "algorithm": {"name": "grpo"},
    "optimizer": {
        "learning_rate": 2e-5,
        "schedule": "linear",
        "warmup_steps": 10,
        "final_learning_rate_fraction": 0.1,
    },
}


def has_model(given: Mapping[str, Any]) -> bool:
    """Whether the user chose a model other than the starter model."""
    model = given.get("model")
    return isinstance(model, Mapping) and bool(model.get("path"))
