"""Whether a backend can honour an algorithm; what it cannot is an error before anything is allocated."""

from __future__ import annotations

from collections.abc import Collection

from rllm_core import providers
from rllm_core.algorithms.selection import Algorithm
from rllm_core.backend import Capabilities
from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError
from rllm_core.plugins import PluginManager


def check_support(config: RunConfig, capabilities: Capabilities, chosen: Algorithm, plugins: PluginManager) -> None:
    """Refuse what the backend cannot honour.

    Raises:
        ConfigError: With the first setting that it cannot.
    """
    losses = capabilities.losses
    if capabilities.torch_losses:
        losses |= plugins.providers(providers.PolicyLoss).keys()
    algorithm, training, backend = config.algorithm, config.training, config.backend
    allowed: Collection[str]
    for key, value, allowed in (
        ("algorithm.loss", algorithm.loss, losses),
        ("algorithm.aggregation", algorithm.aggregation, capabilities.aggregations),
    ):
        if value not in allowed:
            raise ConfigError(
                f"{key} = {value!r} is not among what backend {backend!r} can do: {', '.join(sorted(allowed))}"
            )
    if algorithm.entropy_coefficient > 0 and not capabilities.entropy_bonus:
        raise ConfigError(f"algorithm.entropy_coefficient must be 0: backend {backend!r} has no entropy bonus")
    possible = proximal_policies(capabilities)
    if algorithm.proximal_policy not in possible:
        raise ConfigError(
            f"algorithm.proximal_policy = {algorithm.proximal_policy!r} is not among what backend {backend!r} can do: "
            + ", ".join(sorted(possible))
        )
    if algorithm.kl.coefficient > 0 and algorithm.kl.place not in kl_places(capabilities):
        places = ", ".join(sorted(kl_places(capabilities)))
        raise ConfigError(
            f"algorithm.kl.place = {algorithm.kl.place!r} is not among what backend {backend!r} can do: {places}"
            if places
            else f"algorithm.kl.coefficient must be 0: backend {backend!r} has no reference model"
        )
    if capabilities.colocated and training.staleness_threshold > 0:
        raise ConfigError(
            f"training.staleness_threshold must be 0: backend {backend!r} shares its devices with its engine, so "
            "generation and training take turns; choose a backend, or a setting of it, that separates the two "
            "(for local, local.generation = 'separated')"
        )
    names = [algorithm.name, *(role.name for role in algorithm.roles.values())]
    for name, estimator in zip(names, chosen.estimators.all, strict=True):
        if training.rollouts_per_group < estimator.min_group_size:
            raise ConfigError(
                f"training.rollouts_per_group = {training.rollouts_per_group} is too small: estimator "
                f"{name!r} needs at least {estimator.min_group_size}"
            )


def proximal_policies(capabilities: Capabilities) -> set[str]:
    """The values that ``algorithm.proximal_policy`` may have; any but ``rollout`` allows corrections."""
    possible = {"rollout"}
    if "proximal" in capabilities.policies and capabilities.per_token_advantages:
        possible.add("forward")
    return possible | ({"interpolated"} if capabilities.interpolated_proximal else set())


def kl_places(capabilities: Capabilities) -> set[str]:
    """The values that ``algorithm.kl.place`` may have with a coefficient above 0."""
    if "reference" not in capabilities.policies:
        return set()
    return ({"loss"} if capabilities.kl_loss else set()) | ({"reward"} if "current" in capabilities.policies else set())
