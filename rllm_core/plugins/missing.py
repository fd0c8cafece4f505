"""Explains why a provider cannot be selected: it is not installed, its name is wrong, or its plugin cannot be used."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

from rllm_core.errors import PluginError
from rllm_core.plugins.listing import Plugin
from rllm_core.providers import KINDS, Provider

FIRST_PARTY_FILE = Path(__file__).with_name("first_party.toml")


@cache
def first_party() -> dict[tuple[type[Provider], str], str]:
    """Distributions of our own plugins' providers, by kind and name."""
    kinds = {kind.hook: kind for kind in KINDS}
    written = tomllib.loads(FIRST_PARTY_FILE.read_text(encoding="utf-8"))
    return {
        (kinds[hook], name): distribution
        for distribution, hooks in written.items()
        for hook, names in hooks.items()
        for name in names
    }


def not_installed_distributions(
    packages: Collection[str], kind: type[Provider] | None = None
) -> dict[str, list[tuple[type[Provider], str]]]:
    """Returns our own distributions that are not among ``packages``, with their providers (all, or of one ``kind``)."""
    found: dict[str, list[tuple[type[Provider], str]]] = {}
    for (owner, name), distribution in first_party().items():
        if distribution not in packages and kind in (None, owner):
            found.setdefault(distribution, []).append((owner, name))
    return found


def not_found(
    kind: type[Provider], name: str, package: str, plugins: Sequence[Plugin], names: Collection[str]
) -> PluginError:
    """Returns the error for a provider that is in no usable plugin.

    ``package`` is the distribution that the user named, or ""; ``names`` can be selected.
    """
    from rllm_core.plugins.requirements import pip_install

    distribution = first_party().get((kind, name))
    unusable = unusable_plugin(kind, name, package, distribution, plugins)
    if unusable is not None:
        return unusable
    wanted = f"{package}/{name}" if package else name
    parts = [f"no {kind.kind} named {wanted!r}"]
    if distribution is not None and not package:
        parts.append(f"install it with: {pip_install(distribution)}")
    elif re.search(r"\.py(:|$)", wanted):
        parts.append(f"a file is named by a path that begins with ./: ./{wanted}")
    elif wanted.endswith((".yaml", ".yml", ".json")):
        parts.append("a run file is TOML, and its name ends in .toml")
    else:
        known = [*names, *(first for owner, first in first_party() if owner is kind and first not in names)]
        close = (difflib.get_close_matches(each, known, n=1, cutoff=0.6) for each in (wanted, package))
        near = next(filter(None, close), [])  # NAME/VARIANT looks like DISTRIBUTION/NAME
        parts += [f"did you mean {near[0]!r}?"] if near else []
    parts.append("installed: " + (", ".join(names) or "none"))
    broken = [plugin for plugin in plugins if plugin.status in ("broken", "conflict")]
    if broken:
        parts.append("not usable: " + "; ".join(f"{one.candidate.label}: {one.error}" for one in broken))
    error = PluginError("; ".join(parts))
    if len(broken) == 1:
        error.__cause__ = broken[0].failure
    return error


def not_installed(kind: type[Provider], name: str, distribution: str, plugins: Sequence[Plugin]) -> PluginError:
    """Returns the error for one of our own providers that is not installed, or whose plugin cannot be used."""
    from rllm_core.plugins.requirements import pip_install  # imported here: it is slow, and listing does not need it

    install = pip_install(distribution)
    needs = f"{kind.kind} {name!r} needs {distribution}, which is not installed; install it with: {install}"
    return unusable_plugin(kind, name, "", distribution, plugins) or PluginError(needs)


def unusable_plugin(
    kind: type[Provider], name: str, package: str, distribution: str | None, plugins: Sequence[Plugin]
) -> PluginError | None:
    """Returns the error if the plugin that probably has the provider is installed, but cannot be used."""
    for plugin in plugins:
        c = plugin.candidate
        is_meant = c.is_from(package) if package else c.name == name or c.package == distribution
        if is_meant and plugin.status in ("broken", "conflict", "disabled"):
            state = "in conflict" if plugin.status == "conflict" else plugin.status
            error = PluginError(f"{kind.kind} {name!r}: plugin {c.name!r} ({c.label}) is {state}: {plugin.error}")
            error.__cause__ = plugin.failure
            return error
    return None
