"""Selection of a run's algorithm components by their names in the run file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rllm_core import providers
from rllm_core.algorithms.advantages import AdvantageEstimator, RoleEstimators
from rllm_core.algorithms.corrections import Correction, Corrections
from rllm_core.assembly.components import configured, create, overlong_penalty, select_corrections
from rllm_core.assembly.resolution import Resolved
from rllm_core.backend import Capabilities
from rllm_core.config import AlgorithmConfig, RoleConfig, RunConfig
from rllm_core.errors import ConfigError
from rllm_core.plugins import PluginManager, Provided

if TYPE_CHECKING:
    from rllm_core.algorithms.torch_losses import PolicyLoss


@dataclass(frozen=True)
class Algorithm:
    """The algorithm components that the core computes itself: everything but the loss."""

    estimators: RoleEstimators
    corrections: Corrections

    @classmethod
    def of(cls, resolved: Resolved) -> Algorithm:
        """Loads and configures the components of a run.

        Raises:
            ConfigError: If options are wrong, or corrections would count a ratio twice.
            PluginError: If the plugin of a component is broken.
        """
        config = resolved.config
        algorithm = config.algorithm

        def estimator(chosen: AlgorithmConfig | RoleConfig, where: str) -> AdvantageEstimator:
            provided, options = resolved.estimators[chosen.name], chosen.estimator_options
            found: AdvantageEstimator = create(
                resolved.plugins, provided, f"{where}.name", chosen.name, options, f"{where}.estimator_options"
            )
            return found

        roles = algorithm.roles
        by_role = {role: estimator(chosen, f"algorithm.roles.{role}") for role, chosen in roles.items()}
        weights = {role: chosen.weight for role, chosen in roles.items()}
        estimators = RoleEstimators(estimator(algorithm, "algorithm"), by_role, overlong_penalty(config), weights)
        return cls(estimators, _corrections(config, resolved.plugins, resolved.corrections))


def corrections_of(config: RunConfig, plugins: PluginManager) -> Corrections:
    """Returns the corrections of a run, for backends that apply them themselves.

    Raises:
        ConfigError: If options are wrong, or the corrections would count a ratio twice.
        PluginError: If the plugin of a correction is missing or broken.
    """
    return _corrections(config, plugins, select_corrections(config, plugins))


def _corrections(
    config: RunConfig, plugins: PluginManager, chosen: Mapping[str, Provided[providers.CorrectionProvider]]
) -> Corrections:
    algorithm = config.algorithm
    found: list[Correction] = []
    for name in algorithm.corrections:
        options, where = algorithm.correction_options.get(name, {}), f"algorithm.correction_options.{name}"
        found.append(create(plugins, chosen[name], "algorithm.corrections", name, options, where))
    if found and algorithm.proximal_policy == "rollout":
        raise ConfigError(
            f"algorithm.corrections = {list(algorithm.corrections)} needs algorithm.proximal_policy = 'forward' or "
            "'interpolated': with 'rollout', the ratio of the loss already refers to the sampling policy, so the "
            "correction would count it twice"
        )
    weighing = [name for name, one in zip(algorithm.corrections, found, strict=True) if not one.is_mask]
    if len(weighing) > 1 or len(set(algorithm.corrections)) < len(found):
        raise ConfigError(
            f"algorithm.corrections = {list(algorithm.corrections)} counts one ratio twice: use only one of "
            f"{', '.join(sorted(set(weighing)) or algorithm.corrections)}, plus any masks"
        )
    return Corrections(found)


def policy_loss(config: RunConfig, plugins: PluginManager) -> PolicyLoss:
    """Returns the loss of a run, for backends that train with torch.

    Raises:
        ConfigError: If its name is unknown or its options are wrong.
        PluginError: If its plugin is broken.
    """
    name, options = config.algorithm.loss, config.algorithm.loss_options
    loss: PolicyLoss = configured(
        plugins, providers.PolicyLossProvider, "algorithm.loss", name, options, "algorithm.loss_options"
    )
    return loss


def passes(config: RunConfig, capabilities: Capabilities, algorithm: Algorithm) -> tuple[int, int]:
    """Returns the groups per forward-backward pass, and the groups to wait for before the first pass of a step.

    A backend that cannot normalize the loss after the passes gets a step in one pass. With an estimator that needs the
    whole batch, or a backend that shares its devices with the engine, training waits for all groups of a step.
    """
    whole = config.training.groups_per_step
    per_pass = config.groups_per_pass if capabilities.deferred_normalisation else whole
    per_take = whole if capabilities.colocated or algorithm.estimators.scope == "batch" else per_pass
    return per_pass, per_take
