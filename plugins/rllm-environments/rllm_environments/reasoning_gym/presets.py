"""Settings for workflow ``reasoning_gym``, tested with the chosen dataset and model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm_core.run_file import Preset
from rllm_environments.instruction_tuned import has_model
from rllm_environments.reasoning_gym.workflow import ReasoningGymConfig

STARTER: dict[str, Any] = {
    "training": {"steps": 250, "groups_per_step": 16, "rollouts_per_group": 16},
    "rollout": {"max_response_tokens": 32},
    "algorithm": {"name": "grpo", "entropy_coefficient": 0.002},
    "optimizer": {
        "learning_rate": 1e-3,
        "schedule": "linear",
        "warmup_steps": 5,
        "final_learning_rate_fraction": 0.05,
    },
}
SPELL_BACKWARD: dict[str, Any] = {
    **STARTER,
    "training": {**STARTER["training"], "steps": 200},
    "rollout": {"max_response_tokens": 8},
    # Enough tasks to include nearly all of the 1,000 words that are not held out.
    "reasoning_gym": {"options": {"min_word_len": 3, "max_word_len": 3}, "train_size": 5000},
}
INSTRUCTION_TUNED: dict[str, Any] = {
    "training": {"steps": 200, "groups_per_step": 16, "rollouts_per_group": 8},
    "rollout": {"max_response_tokens": 1024},
    "algorithm": {"name": "grpo"},
    "optimizer": {
        "learning_rate": 1e-6,
        "schedule": "constant",
        "warmup_steps": 10,
    },
    "reasoning_gym": {"answer": "tags"},
}


def run_file(given: Mapping[str, Any]) -> Preset:
    """Returns settings for the chosen dataset, and for the starter model or another model.

    Only ``spell_backward`` with words of three letters has been shown to learn on the starter model.
    """
    section = given.get("reasoning_gym")
    chosen = section.get("environment") if isinstance(section, Mapping) else None
    environment = chosen or ReasoningGymConfig.model_fields["environment"].default
    if has_model(given):
        tables, reason = INSTRUCTION_TUNED, "settings for an instruction-tuned model"
    elif environment == "spell_backward":
        tables, reason = SPELL_BACKWARD, "settings for the starter model: words of three letters, which it learns"
    else:
        tables, reason = STARTER, "settings for the starter model, which were not tried with this dataset"
    return Preset(tables, reason)
