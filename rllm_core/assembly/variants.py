"""Selects the workflow of a run file: ``NAME``, ``NAME/VARIANT`` or ``DISTRIBUTION/NAME``.

A variant is one of several environments of a workflow. ``NAME/VARIANT`` is short for two settings, so that the rest of
the core need not know about variants: ``workflow = "NAME"``, and ``environment = "VARIANT"`` in the section ``[NAME]``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from rllm_core.assembly.elsewhere import provided_elsewhere
from rllm_core.errors import ConfigError, PluginError
from rllm_core.file_references import is_class_reference, is_file_reference, section_name
from rllm_core.plugins import PluginManager, Provided
from rllm_core.plugins.discovery import normalized
from rllm_core.providers import WorkflowProvider
from rllm_core.run_file import toml_key

SHOWN_VARIANTS = 5


def select_workflow(
    plugins: PluginManager, name: str, tables: Mapping[str, Any]
) -> tuple[Provided[WorkflowProvider], dict[str, Any]]:
    """Selects a workflow, in the interpreter that has it; returns it with the tables that ``name`` expands to.

    Raises:
        ConfigError: If the workflow does not have the variant, or its section names another one.
        PluginError: If the workflow is missing or broken.
    """
    rollout = tables.get("rollout")
    python = rollout.get("python") if isinstance(rollout, Mapping) else None
    if isinstance(python, str) and python:
        provided, own, variant = provided_elsewhere(python, name, tables)
    else:
        own, variant = _split(plugins, name)
        provided = plugins.select(WorkflowProvider, own)
        if variant is not None:
            _check(provided, plugins, own, variant)
    if variant is None:
        return provided, {"workflow": own}
    section = section_name(own)
    table = tables.get(section)
    other = table.get("environment", variant) if isinstance(table, Mapping) else variant
    if other != variant:
        raise ConfigError(
            f"workflow = {name!r} and {toml_key(section)}.environment = {other!r} name two environments; remove one"
        )
    return provided, {"workflow": own, section: {"environment": variant}}


def check_named(
    provided: Provided[WorkflowProvider], plugins: PluginManager, name: str, tables: Mapping[str, Any]
) -> None:
    """Rejects a run that names no variant of a workflow with variants, unless the workflow has a default.

    Raises:
        ConfigError: If the run must name a variant; the message lists some.
    """
    record, table = provided.record, tables.get(section_name(name), {})
    if record.variants is None or record.config is None or not isinstance(table, Mapping) or "environment" in table:
        return
    if plugins.load(provided, record.config).model_fields["environment"].is_required():
        known = variants_of(provided, plugins)
        some = ", ".join(f"{name}/{each}" for each in known[:SHOWN_VARIANTS])
        raise ConfigError(f"workflow = {name!r}: name one of its {len(known)} environments, such as {some}")


def variants_of(provided: Provided[WorkflowProvider], plugins: PluginManager) -> list[str]:
    """Returns the variants of a workflow; empty if it has none. Imports its plugin's code.

    Raises:
        PluginError: If the plugin cannot list them.
    """
    path = provided.record.variants
    if path is None:
        return []
    find = plugins.load(provided, path)
    with provided.at_work("its variants", find):
        found = list(find())
    wrong = [name for name in found if not (isinstance(name, str) and name and name.isprintable())]
    if wrong:
        raise PluginError(
            f"workflow {provided.record.name!r} ({provided.plugin.label}): {path} returned the variant "
            f"{wrong[0]!r:.80}, not a printable name"
        )
    return found


def _split(plugins: PluginManager, name: str) -> tuple[str, str | None]:
    """Splits ``name`` into the name of the workflow and the variant; None without a variant."""
    if "/" not in name or is_file_reference(name) or is_class_reference(name):
        return name, None
    found = plugins.providers(WorkflowProvider)
    distribution, _, rest = name.partition("/")
    if any(
        (normalized(one.plugin.package), one.record.name) == (normalized(distribution), rest) for one in found.values()
    ):
        return name, None
    for key, one in found.items():
        for own in (key, one.qualified):
            if name.startswith(f"{own}/"):
                return own, name.removeprefix(f"{own}/")
    from rllm_core.plugins.missing import first_party  # only errors need it

    return (distribution, rest) if (WorkflowProvider, distribution) in first_party() else (name, None)


def _check(provided: Provided[WorkflowProvider], plugins: PluginManager, name: str, variant: str) -> None:
    """Rejects a variant that the workflow does not have."""
    known = variants_of(provided, plugins)
    if variant in known:
        return
    if not known:
        raise ConfigError(f"workflow = '{name}/{variant}': workflow {name!r} has no variants; use workflow = {name!r}")
    by_lower = {each.lower(): each for each in known}
    near = [by_lower[each] for each in difflib.get_close_matches(variant.lower(), by_lower, cutoff=0.6)]
    some = ", ".join(near or known[:SHOWN_VARIANTS])
    advice = f"did you mean {some}?" if near else f"it has {len(known)}, such as {some}."
    raise ConfigError(
        f"workflow = {f'{name}/{variant}'!r}: workflow {name!r} has no variant {variant!r}; {advice} For one that is "
        f"not listed, write workflow = {name!r} and {toml_key(section_name(name))}.environment = {variant!r}"
    )
