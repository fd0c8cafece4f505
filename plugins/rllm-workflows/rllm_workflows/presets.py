"""Settings that several workflows share in their own run files."""

from __future__ import annotations

from typing import Any

# For a small instruction-tuned model. Short answers need fewer tokens, reasoning needs more.
INSTRUCTION_TUNED: dict[str, dict[str, Any]] = {
    "training": {"steps": 200, "groups_per_step": 16, "rollouts_per_group": 8},
    "rollout": {"max_response_tokens": 256},
    "algorithm": {"name": "grpo"},
    "optimizer": {
        "learning_rate": 2e-5,
        "schedule": "linear",
        "warmup_steps": 10,
        "final_learning_rate_fraction": 0.1,
    },
}
