"""What is added to rewards before advantages are computed; rewards that are reported stay as they were given."""

from __future__ import annotations

from dataclasses import dataclass

from rllm_core.algorithms.advantages.contract import sampled_tokens
from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError
from rllm_core.types import Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class OverlongPenalty:
    """Soft overlong punishment.

    With ``L = max_tokens`` and ``c = penalty_tokens``, to the reward of a response of ``n`` tokens is added::

        0                            if n <= L - c
        penalty * (L - c - n) / c    if L - c < n <= L
        -penalty                     if n > L

    Source: DAPO, arXiv 2503.14476, eq. 13. The response of a trajectory is all that the policy sampled in it, over
    all turns.

    Attributes:
        max_tokens: L.
        penalty_tokens: c.
        penalty: The whole of it.
    """

    max_tokens: int
    penalty_tokens: int
    penalty: float

    @classmethod
    def of(cls, config: RunConfig) -> OverlongPenalty | None:
        """That of a run; None if it has none.

        Raises:
            ConfigError: If it would begin before the first token.
        """
        overlong = config.algorithm.overlong
        if not overlong.penalty_tokens:
            return None
        max_tokens = overlong.max_tokens or config.rollout.max_response_tokens
        if overlong.penalty_tokens > max_tokens:
            limit = "algorithm.overlong.max_tokens" if overlong.max_tokens else "rollout.max_response_tokens"
            raise ConfigError(
                f"algorithm.overlong.penalty_tokens = {overlong.penalty_tokens} must not exceed {limit} = {max_tokens}"
            )
        return cls(max_tokens, overlong.penalty_tokens, overlong.penalty)

    def of_length(self, tokens: int) -> float:
        """What is added to the reward of a response of ``tokens``, at most 0."""
        over = tokens - (self.max_tokens - self.penalty_tokens)
        return -self.penalty * min(max(over, 0), self.penalty_tokens) / self.penalty_tokens

    def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """The group with this added to the rewards of its trajectories."""
        shaped = [self._shaped(trajectory) for trajectory in group.trajectories]
        return group.model_copy(update={"trajectories": shaped})

    def _shaped(self, trajectory: Trajectory) -> Trajectory:
        added = self.of_length(sampled_tokens(trajectory))
        if not added:
            return trajectory
        if trajectory.reward is not None:
            return trajectory.model_copy(update={"reward": trajectory.reward + added})
        last = trajectory.steps[-1]  # rewards are given per step, so this one is given at the end
        rewarded = last.model_copy(update={"reward": (last.reward or 0.0) + added})
        return trajectory.model_copy(update={"steps": [*trajectory.steps[:-1], rewarded]})
