"""Schedules over the optimizer steps of a run, which are counted from 1."""

from __future__ import annotations


def learning_rate(step: int, total_steps: int, *, peak: float, warmup_steps: int, decay_to: float | None) -> float:
    """Computes the learning rate of a step: linear warm-up from 0, then constant, or linear decay.

    Args:
        step: Optimizer step.
        total_steps: Steps in the run.
        peak: Learning rate after warm-up and before decay.
        warmup_steps: Steps of the warm-up; 0 disables it.
        decay_to: Lower limit of the decay as a share of ``peak``; None keeps the rate constant.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if decay_to is None:
        return peak
    # The first step after warm-up gets the peak. 0 would follow the last step, which is to learn too.
    return peak * max(decay_to, (total_steps - step + 1) / max(1, total_steps - warmup_steps))


def linear(step: int, total_steps: int, first: float, last: float) -> float:
    """Interpolates linearly from ``first`` in the first step to ``last`` in the last step."""
    if total_steps <= 1:
        return first
    return first + (last - first) * min(1.0, (step - 1) / (total_steps - 1))
