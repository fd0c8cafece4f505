"""Keys of the run file: their types, defaults and descriptions, and checks of values that must fit each other.

`rllm_core.assembly.resolution` reads run files.
"""

from __future__ import annotations

import difflib
import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rllm_core.config.algorithm import AlgorithmConfig, KLConfig, OverlongConfig, RoleConfig
from rllm_core.config.costs import BudgetConfig, CostsConfig, PricesConfig
from rllm_core.config.training import RolloutConfig, TrainingConfig
from rllm_core.errors import ConfigError
from rllm_core.moved import moved_names
from rllm_core.run_file import Section, to_toml
from rllm_core.schedules import learning_rate

__all__ = [
    "AlgorithmConfig",
    "BudgetConfig",
    "ConfigError",
    "CostsConfig",
    "KLConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "PricesConfig",
    "RoleConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "TeacherConfig",
    "TrainingConfig",
    "to_toml",
]

__getattr__ = moved_names(__name__)


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


class OptimizerConfig(Section, use_attribute_docstrings=True):
    """``[optimizer]``: AdamW and its learning-rate schedule."""

    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-5
    """Peak learning rate, after warm-up and before decay."""
    schedule: Literal["constant", "linear"] = "constant"
    """Schedule after warm-up: constant, or linear decay over the run."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up from 0. 0 disables it."""
    final_learning_rate_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Lower limit of the linear decay, as a share of learning_rate."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay rate of the second moment."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Term added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay, decoupled from the gradient."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it."""

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """Learning rate of optimizer step ``step`` (from 1): linear warm-up, then constant or linear decay."""
        return learning_rate(
            step,
            total_steps,
            peak=self.learning_rate,
            warmup_steps=self.warmup_steps,
            decay_to=None if self.schedule == "constant" else self.final_learning_rate_fraction,
        )


class RunConfig(Section, use_attribute_docstrings=True):
    """A complete run file. Plugin sections are under ``plugins``, by provider name."""

    workflow: str
    """Name of the workflow."""
    backend: str = "local"
    """Name of the backend."""
    parser: str = ""
    """Name of the parser. Defaults to the backend's."""
    requires: tuple[str, ...] = ()
    """Required distributions, such as "rllm-local>=0.1"."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    costs: CostsConfig = Field(default_factory=CostsConfig)
    plugins: dict[str, Any] = Field(default_factory=dict, exclude=True)

    @model_validator(mode="after")
    def _check_together(self) -> RunConfig:
        training = self.training
        passes = training.groups_per_forward_backward
        if passes is not None and training.groups_per_step % passes:
            raise ValueError(
                f"training.groups_per_forward_backward = {passes} does not divide "
                f"training.groups_per_step = {training.groups_per_step}"
            )
        if training.answers_table_every_steps and not training.groups_kept_per_step:
            raise ValueError(
                "training.answers_table_every_steps shows the recorded groups, but training.groups_kept_per_step = 0 "
                "records none"
            )
        chosen = self.algorithm.corrections
        unused = sorted(self.algorithm.correction_options.keys() - set(chosen))
        if unused:
            near = difflib.get_close_matches(unused[0], chosen, n=1, cutoff=0.6)
            raise ValueError(
                f"algorithm.correction_options.{unused[0]} has no correction in algorithm.corrections = "
                f"{list(chosen)}; "
                + (f"did you mean {near[0]!r}?" if near else "add the correction, or remove its options")
            )
        twice = [name for number, name in enumerate(training.trackers) if name in training.trackers[:number]]
        if twice:
            raise ValueError(f"training.trackers names {twice[0]!r} twice; leave one out")
        if training.partial_rollout and training.staleness_threshold == 0:
            raise ValueError(
                "training.partial_rollout = true needs training.staleness_threshold > 0: "
                "in synchronous training no rollout is running when weights change"
            )
        return self

    @property
    def window_quota(self) -> int:
        """See `TrainingConfig.window_quota`."""
        return self.training.window_quota

    @property
    def groups_per_pass(self) -> int:
        """Groups per gradient-accumulation pass."""
        return self.training.groups_per_forward_backward or self.training.groups_per_step

    def derived(self) -> dict[str, int]:
        """Numbers computed from the run file, by name."""
        training = self.training
        groups, rollouts = training.groups_per_step, training.rollouts_per_group
        return {
            "groups_per_step": groups,
            "rollouts_per_step": groups * rollouts,
            "forward_backward_passes_per_step": groups // self.groups_per_pass,
            "optimizer_steps": training.steps,
            "policy_versions": math.ceil(training.steps / training.trigger_parameter_sync_step),
            "rollouts_in_total": training.steps * groups * rollouts,
            "max_groups_in_flight": self.window_quota,
            "max_rollouts_in_flight": min(self.window_quota * rollouts, self.rollout.max_concurrent_rollouts),
        }

    def to_tables(self) -> dict[str, Any]:
        """Returns the resolved file as nested tables, with plugin sections and without unset keys."""
        tables = self.model_dump(mode="json", exclude_none=True)
        for name, section in self.plugins.items():
            tables[name] = section.model_dump(mode="json", exclude_none=True)
        return tables
