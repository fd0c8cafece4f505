"""What the core itself provides, through the same hooks as everybody else."""

from __future__ import annotations

from rllm_core.hookspecs import hookimpl
from rllm_core.providers import AdvantageEstimator

_ADVANTAGES = "rllm_core.algorithms.advantages"


@hookimpl
def advantage_estimators() -> list[AdvantageEstimator]:
    """The estimators in `rllm_core.algorithms.advantages`."""
    return [
        AdvantageEstimator(name="grpo", load=f"{_ADVANTAGES}:GRPO", summary="Group mean and standard deviation."),
        AdvantageEstimator(name="rloo", load=f"{_ADVANTAGES}:RLOO", summary="Leave-one-out mean of the group."),
        AdvantageEstimator(
            name="return_to_go", load=f"{_ADVANTAGES}:ReturnToGo", summary="Per-turn returns with a baseline."
        ),
    ]
