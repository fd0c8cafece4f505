"""Advantage estimators: assign advantages to the steps or tokens of trajectories."""

from rllm_core.algorithms.advantages.contract import AdvantageEstimator, Advantages, Credit, RoleEstimators

__all__ = ["AdvantageEstimator", "Advantages", "Credit", "RoleEstimators"]
