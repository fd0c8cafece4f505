"""The whole run file, and checks of values that must fit each other across its sections."""

from __future__ import annotations

import difflib
import math
from typing import Any

from pydantic import Field, model_validator

from rllm_core.config.algorithm import AlgorithmConfig
from rllm_core.config.costs import CostsConfig
from rllm_core.config.model import ModelConfig, TeacherConfig
from rllm_core.config.optimizer import OptimizerConfig
from rllm_core.config.training import RolloutConfig, TrainingConfig
from rllm_core.run_file import Section


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
