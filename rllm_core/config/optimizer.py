"""``[optimizer]``: AdamW and its learning-rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rllm_core.run_file import Section
from rllm_core.schedules import learning_rate


class OptimizerConfig(Section, use_attribute_docstrings=True):
    """``[optimizer]``: AdamW and its learning-rate schedule."""

    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-5
    """Peak learning rate, after warm-up and before decay."""
    schedule: Literal["constant", "linear"] = "constant"
    """Schedule after warm-up: constant, or linear decay over the rest of the run, toward 0 after the last step."""
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
