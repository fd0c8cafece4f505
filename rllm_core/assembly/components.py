"""Finds the components of an algorithm by name, loads them and sets their options. Errors are one line each."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, TypeVar

from rllm_core import providers
from rllm_core.algorithms.aggregation import Aggregation
from rllm_core.algorithms.options import Configured
from rllm_core.algorithms.shaping import OverlongPenalty
from rllm_core.config import KLConfig, RunConfig
from rllm_core.errors import ConfigError, PluginError, UserError
from rllm_core.plugins import PluginManager, Provided
from rllm_core.plugins.blame import blamed, located
from rllm_core.run_file import Section

ProviderT = TypeVar("ProviderT", bound=providers.Provider)


def piece_class(plugins: PluginManager, provided: Provided[Any]) -> type[Configured]:
    """Returns the class that a provider record names. Loading a loss imports torch.

    Raises:
        PluginError: If it cannot be imported, or has the wrong base class.
    """
    found: type[Configured] = plugins.load(provided)
    if not issubclass(found.options_model, Section):
        raise PluginError(
            f"{provided.record.kind} {provided.record.name!r} ({provided.plugin.label}): its options_model must be a "
            "subclass of rllm_core.config.Section, or unknown keys would be ignored; choose another, and report this "
            "to its authors"
        )
    return found


def select_component(plugins: PluginManager, kind: type[ProviderT], key: str, name: str) -> Provided[ProviderT]:
    """Selects the component for the setting ``key = name``."""
    try:
        return plugins.select(kind, name)
    except PluginError as error:
        raise PluginError(f"{key} = {name!r}: {error}") from error


def select_corrections(config: RunConfig, plugins: PluginManager) -> dict[str, Provided[providers.CorrectionProvider]]:
    """Selects the corrections of a run, by name."""
    kind, key = providers.CorrectionProvider, "algorithm.corrections"
    return {name: select_component(plugins, kind, key, name) for name in config.algorithm.corrections}


def configured(
    plugins: PluginManager, kind: type[providers.Provider], key: str, name: str, options: Mapping[str, Any], where: str
) -> Any:
    """Selects and creates a component; see `create`."""
    return create(plugins, select_component(plugins, kind, key, name), key, name, options, where)


def create(
    plugins: PluginManager, provided: Provided[Any], key: str, name: str, options: Mapping[str, Any], where: str
) -> Any:
    """Creates the component for the setting ``key = name``; ``where`` is the location of its options in the run file.

    Raises:
        ConfigError: If the options are wrong.
        PluginError: If the component is broken.
    """
    kind = type(provided.record)
    found = piece_class(plugins, provided)
    label = f"{kind.kind} {name!r} ({provided.plugin.label})"
    for option in options:
        owners = [] if option in found.options_model.model_fields else _who_has(plugins, kind, option)
        if owners:
            raise ConfigError(
                f"unknown key {f'{where}.{option}'!r}: it is an option of {' and '.join(map(repr, owners))}, but "
                f"{key} = {name!r}; remove it, or change {key}"
            )
    try:
        component = found(options, where=where)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the class may come from any plugin
        raise PluginError(
            f"{label} cannot be created: {located(error, provided.plugin.package)}; choose another, and report this to "
            "its authors"
        ) from error
    component.label = label
    component.describe = blamed
    return component


def aggregation_of(config: RunConfig) -> Aggregation:
    """Returns the aggregation of a run, for backends that aggregate themselves."""
    algorithm = config.algorithm
    return Aggregation(algorithm.aggregation, algorithm.aggregation_norm_tokens or config.rollout.max_response_tokens)


def overlong_penalty(config: RunConfig) -> OverlongPenalty | None:
    """Returns the overlong penalty of a run, or None.

    Raises:
        ConfigError: If the penalty would start before the first token.
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
    return OverlongPenalty(max_tokens, overlong.penalty_tokens, overlong.penalty)


def kl_notes(kl: KLConfig) -> list[str]:
    """Notes for ``--dry-run`` on settings that do not have the expected effect."""
    if kl.coefficient > 0 and kl.place == "loss" and kl.estimator == "k1":
        return [
            "algorithm.kl.estimator = 'k1' in the loss has a gradient of zero on average, so it only adds noise and "
            "does not keep the policy near the reference model; use 'k2' or 'k3', or algorithm.kl.place = 'reward'"
        ]
    return []


def _who_has(plugins: PluginManager, kind: type[providers.Provider], option: str) -> list[str]:
    """Returns the names of the components that have an option, leaving out broken ones."""
    owners = []
    for name, provided in plugins.providers(kind).items():
        with contextlib.suppress(PluginError):
            if option in piece_class(plugins, provided).options_model.model_fields:
                owners.append(name)
    return owners
