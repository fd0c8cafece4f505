"""``[model]`` and ``[teacher]``: the models of a run."""

from __future__ import annotations

from rllm_core.run_file import Section


class ModelConfig(Section, use_attribute_docstrings=True):
    """``[model]``: the model to train."""

    path: str = ""
    """Model folder, or Hugging Face model ID."""


class TeacherConfig(Section, use_attribute_docstrings=True):
    """``[teacher]``: the model that scores the policy's tokens, for estimators that need one (``distill``)."""

    engine: str = ""
    """Name of a rollout engine that computes log-probabilities. Defaults to no teacher."""
    model: str = ""
    """Folder or Hugging Face model ID of the teacher model."""
    parser: str = ""
    """Name of the parser for the teacher's prompts. By default, the teacher reads the policy's tokens if both share one
    vocabulary. Otherwise it reads messages, rendered by the run's parser for the teacher's model.
    """
