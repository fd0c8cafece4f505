"""Reward shaping before advantages are computed. Reported rewards stay unshaped."""

from __future__ import annotations

from dataclasses import dataclass

from rllm_core.algorithms.advantages import sampled_tokens
from rllm_core.types import Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class OverlongPenalty:
    """Soft overlong penalty.

    With ``L = max_tokens`` and ``c = penalty_tokens``, a response of ``n`` tokens adds this to the reward::

        0                            if n <= L - c
        penalty * (L - c - n) / c    if L - c < n <= L
        -penalty                     if n > L

    Source: DAPO, arXiv 2503.14476, eq. 13. The response of a trajectory is everything that the policy sampled in it,
    over all turns.

    Attributes:
        max_tokens: L, the response length at which the full penalty applies.
        penalty_tokens: c, the number of tokens over which the penalty rises.
        penalty: Full penalty.
    """

    max_tokens: int
    penalty_tokens: int
    penalty: float

    def of_length(self, tokens: int) -> float:
        """Amount added to the reward of a response of ``tokens``; 0 or negative."""
        over = tokens - (self.max_tokens - self.penalty_tokens)
        return -self.penalty * min(max(over, 0), self.penalty_tokens) / self.penalty_tokens

    def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """Returns the group with the penalty applied to its trajectories."""
        shaped = [self._shaped(trajectory) for trajectory in group.trajectories]
        return group.model_copy(update={"trajectories": shaped})

    def _shaped(self, trajectory: Trajectory) -> Trajectory:
        added = self.of_length(sampled_tokens(trajectory))
        if not added:
            return trajectory
        if trajectory.reward is not None:
            return trajectory.model_copy(update={"reward": trajectory.reward + added})
        last = trajectory.steps[-1]  # rewards are per step, so penalize the last step
        rewarded = last.model_copy(update={"reward": (last.reward or 0.0) + added})
        return trajectory.model_copy(update={"steps": [*trajectory.steps[:-1], rewarded]})
