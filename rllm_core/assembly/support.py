"""Checks that a backend supports the run's algorithm, before anything is allocated."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from typing import Any

from rllm_core import providers
from rllm_core.assembly.algorithm import Algorithm, policy_loss
from rllm_core.backend import Capabilities
from rllm_core.config import RunConfig
from rllm_core.errors import ConfigError
from rllm_core.file_references import is_file_reference
from rllm_core.plugins import PluginManager


@dataclass(frozen=True, kw_only=True)
class Support:
    """The settings that a backend supports, derived from its declared capabilities and the installed providers.

    Attributes:
        losses: Values of ``algorithm.loss``.
        aggregations: Values of ``algorithm.aggregation``.
        corrections: Possible entries of ``algorithm.corrections``.
        proximal_policies: Values of ``algorithm.proximal_policy``; all values but ``rollout`` allow corrections.
        kl_places: Values of ``algorithm.kl.place`` with a coefficient above 0.
        flags: Other declared capabilities, as in `rllm_core.backend.Capabilities`.
    """

    losses: tuple[str, ...]
    aggregations: tuple[str, ...]
    corrections: tuple[str, ...]
    proximal_policies: tuple[str, ...]
    kl_places: tuple[str, ...]
    flags: dict[str, bool]

    @classmethod
    def of(cls, capabilities: Capabilities, plugins: PluginManager) -> Support:
        """Derives the supported settings from the declared capabilities of a backend. Names are sorted."""
        losses = set(capabilities.losses)
        if capabilities.torch_losses:
            losses |= plugins.providers(providers.PolicyLossProvider).keys()
        proximal = {"rollout"}
        if "proximal" in capabilities.policies and capabilities.per_token_advantages:
            proximal.add("forward")  # needs per-token advantages, because corrections weight single tokens
        if capabilities.interpolated_proximal:
            proximal.add("interpolated")
        places = set()
        if "reference" in capabilities.policies:
            places |= {"loss"} if capabilities.kl_loss else set()
            places |= {"reward"} if "current" in capabilities.policies else set()
        declared = {field.name: getattr(capabilities, field.name) for field in fields(capabilities)}
        resolved_above = ("torch_losses", "interpolated_proximal", "kl_loss")
        return cls(
            losses=tuple(sorted(losses)),
            aggregations=tuple(sorted(capabilities.aggregations)),
            corrections=tuple(plugins.providers(providers.CorrectionProvider)) if len(proximal) > 1 else (),
            proximal_policies=tuple(sorted(proximal)),
            kl_places=tuple(sorted(places)),
            flags={
                name: value
                for name, value in sorted(declared.items())
                if isinstance(value, bool) and name not in resolved_above
            },
        )

    def to_json(self) -> dict[str, Any]:
        """Returns choices as sorted lists and flags as booleans, with sorted keys."""
        written = asdict(self)
        flat: dict[str, Any] = written.pop("flags")
        return dict(sorted({**flat, **{name: list(values) for name, values in written.items()}}.items()))


def check_support(config: RunConfig, capabilities: Capabilities, chosen: Algorithm, plugins: PluginManager) -> None:
    """Rejects settings that the backend does not support.

    Raises:
        ConfigError: For the first unsupported setting, or if options of the loss are wrong.
        PluginError: If the loss is broken, or two plugins provide a loss with this name.
    """
    support = Support.of(capabilities, plugins)
    algorithm, training, backend = config.algorithm, config.training, f"backend {config.backend!r}"
    elsewhere = "or use another backend (rllm-core backends lists what each supports)"

    def unsupported(key: str, value: str, allowed: Collection[str]) -> ConfigError:
        near = difflib.get_close_matches(value, allowed, n=1, cutoff=0.6)
        return ConfigError(
            f"{key} = {value!r} is not supported by {backend}, which supports: {', '.join(allowed)}; "
            + (f"did you mean {near[0]!r}?" if near else f"choose one of these, {elsewhere}")
        )

    if algorithm.loss not in support.losses and not _is_qualified_loss(algorithm.loss, capabilities, plugins):
        raise unsupported("algorithm.loss", algorithm.loss, support.losses)
    if algorithm.loss not in capabilities.losses:
        policy_loss(config, plugins)  # a loss from the hook: check that it loads and its options are valid
    if algorithm.aggregation not in support.aggregations:
        raise unsupported("algorithm.aggregation", algorithm.aggregation, support.aggregations)
    if algorithm.corrections and support.proximal_policies == ("rollout",):
        raise ConfigError(
            f"algorithm.corrections = {list(algorithm.corrections)} must be empty: {backend} supports no proximal "
            f"policy but the sampling policy; remove them, {elsewhere}"
        )
    if algorithm.proximal_policy not in support.proximal_policies:
        raise unsupported("algorithm.proximal_policy", algorithm.proximal_policy, support.proximal_policies)
    if algorithm.kl.coefficient > 0 and not support.kl_places:
        raise ConfigError(
            f"algorithm.kl.coefficient = {algorithm.kl.coefficient} must be 0: {backend} has no reference model; "
            f"remove it, {elsewhere}"
        )
    if algorithm.kl.coefficient > 0 and algorithm.kl.place not in support.kl_places:
        raise unsupported("algorithm.kl.place", algorithm.kl.place, support.kl_places)
    for key, value in (
        ("entropy_coefficient", algorithm.entropy_coefficient),
        ("entropy_coefficient_final", algorithm.entropy_coefficient_final or 0),
    ):
        if value > 0 and not support.flags["entropy_bonus"]:
            raise ConfigError(
                f"algorithm.{key} = {value} must be 0: {backend} has no entropy bonus; remove it, {elsewhere}"
            )
    if support.flags["colocated"] and training.staleness_threshold > 0:
        raise ConfigError(
            f"training.staleness_threshold = {training.staleness_threshold} must be 0: {backend} shares its devices "
            "with its engine, so generation and training take turns; choose a backend, or a setting of it, that "
            "separates them (for local: local.generation = 'separated')"
        )
    for (key, name), estimator in zip(algorithm.estimator_names().items(), chosen.estimators.all, strict=True):
        if estimator.per_token and not support.flags["per_token_advantages"]:
            raise ConfigError(
                f"{key} = {name!r} returns advantages per token, but {backend} trains one advantage per turn; choose "
                f"another estimator (rllm-core algorithms lists them), {elsewhere}"
            )
        if training.rollouts_per_group < estimator.min_group_size:
            raise ConfigError(
                f"training.rollouts_per_group = {training.rollouts_per_group} is too small: {key} = {name!r} needs at "
                f"least {estimator.min_group_size}"
            )


def _is_qualified_loss(name: str, capabilities: Capabilities, plugins: PluginManager) -> bool:
    """Whether ``name`` is a file, or ``DISTRIBUTION/NAME`` of a torch loss. Raises if two plugins provide ``name``."""
    if not capabilities.torch_losses:
        return False
    installed = {provided.qualified for provided in plugins.providers(providers.PolicyLossProvider).values()}
    if name in installed or is_file_reference(name):
        return True
    if any(qualified.rpartition("/")[2] == name for qualified in installed):
        plugins.select(providers.PolicyLossProvider, name)
    return False
