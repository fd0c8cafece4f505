"""Advantage estimators: what each step, or each token, of each trajectory is credited with."""

from rllm_core.algorithms.advantages.contract import AdvantageEstimator, Advantages, Credit, RoleEstimators

__all__ = ["AdvantageEstimator", "Advantages", "Credit", "RoleEstimators"]
