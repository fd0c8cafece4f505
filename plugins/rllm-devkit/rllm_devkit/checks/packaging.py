"""Checks of a plugin's packaging, such as its metadata and README. Reads files, imports nothing.

Findings are warnings: the plugin works anyway.
"""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Literal

from importlib_metadata import Distribution
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from rllm_core import API_VERSION
from rllm_core.plugins import CORE_PACKAGE, PluginInfo
from rllm_core.plugins.discovery import declared_requirements, identity, installed_distributions, normalized
from rllm_core.plugins.loading import DECLARED_API_VERSION
from rllm_core.plugins.probe import Health
from rllm_devkit.checks.results import CheckResult
from rllm_devkit.templates import KINDS, PackageNames, template

WARNING: Literal["warning"] = "warning"

_TO_AUTHORS = "## What to change"  # heading in the templates' READMEs, meant for the package's author


def packaging_checks(plugin: PluginInfo, health: Health) -> list[CheckResult]:
    """Checks the package of a plugin.

    Args:
        plugin: Plugin to check.
        health: Result of importing it.

    Returns:
        Results with outcome ``passed`` or `WARNING`.
    """
    distribution = next(d for d in installed_distributions() if identity(d) == (plugin.package, plugin.version))
    metadata = distribution.metadata
    summary, python = metadata.get("Summary") or "", metadata.get("Requires-Python") or ""
    readme = metadata.get("Description") or metadata.get_payload() or ""
    licence = metadata.get("License-Expression") or metadata.get("License") or ""
    if not licence:
        stated = (value for value in metadata.get_all("Classifier", []) if value.startswith("License ::"))
        licence = next(stated, "").rpartition("::")[2].strip()
    return [
        _name(plugin),
        _version(plugin),
        _verdict("summary", None if summary else "pyproject.toml has no description", summary),
        _verdict(
            "readme", None if str(readme).strip() else "pyproject.toml has no readme", f"{len(readme)} characters"
        ),
        _verdict("licence", None if licence else "pyproject.toml has no license", licence.partition("\n")[0]),
        _verdict("python", None if python else "pyproject.toml has no requires-python", python),
        _requirements(distribution),
        _typed(plugin),
        *(_declared(health) if health.plugin.status == "loaded" else ()),
        _leftovers(plugin, health, summary, str(readme)),
    ]


def _declared(health: Health) -> list[CheckResult]:
    """Checks the summaries and the API version in the plugin's entry module."""
    silent = [f"{provided['kind']} {provided['name']!r}" for provided in health.provides if not provided["summary"]]
    module = health.plugin.value.partition(":")[0]
    wanted = f'declare the API version it was written for: {DECLARED_API_VERSION} = "{API_VERSION}" in {module}'
    return [
        _verdict("summaries", f"no summary: {', '.join(silent)}" if silent else None, str(len(health.provides))),
        _verdict("api version", wanted if health.api_version is None else None, str(health.api_version)),
    ]


def _leftovers(plugin: PluginInfo, health: Health, summary: str, readme: str) -> CheckResult:
    """Finds text from the template of ``rllm-core new`` that the author has not replaced."""
    names = PackageNames(plugin.name)
    found: dict[str, str] = {}
    for kind in KINDS:
        files = template(kind)
        project = tomllib.loads(files["pyproject.toml"])["project"]
        if summary == project["description"]:
            found["description of pyproject.toml"] = summary
        first = names.fill(files["README.md"]).split("\n\n")[1]
        for paragraph in (first, _TO_AUTHORS):
            if paragraph in readme:
                found["README.md"] = " ".join(paragraph.split())
        unchanged = _summary(files)
        for provided in health.provides:
            if provided["summary"] == unchanged:
                found[f"summary of {provided['kind']} {provided['name']!r}"] = provided["summary"]
    told = "; ".join(f"{where}: {text!r:.80}" for where, text in found.items())
    problem = f"replace the text left over from the template of rllm-core new: {told}" if found else None
    return _verdict("template", problem, "no text left over from a template")


def _summary(files: dict[str, str]) -> str | None:
    """Returns the template's first summary; any second provider is a helper that most packages keep.

    An observer provides nothing, so it has no summary.
    """
    [light_module] = [text for path, text in files.items() if path.endswith("/__init__.py")]
    found = re.search(r'summary="([^"]*)"', light_module)
    return found[1] if found is not None else None


def _verdict(name: str, problem: str | None, seen: str) -> CheckResult:
    return CheckResult(name, "passed", seen) if problem is None else CheckResult(name, WARNING, problem)


def _name(plugin: PluginInfo) -> CheckResult:
    module = plugin.value.partition(":")[0]
    package = normalized(plugin.package)
    wanted = [f"rllm-{normalized(plugin.name)}", f"rllm_{normalized(plugin.name).replace('-', '_')}"]
    # A distribution may have several plugins, whose names start with its own.
    fits = package == wanted[0] or wanted[0].startswith(f"{package}-")
    problem = None
    if not fits or module.partition(".")[0] != package.replace("-", "_"):
        problem = (
            f"distribution {plugin.package!r}, entry point {plugin.name!r} and module {module!r} do not match; "
            f"expected {wanted[0]!r}, {plugin.name!r} and {wanted[1]!r}"
        )
    return _verdict("names", problem, f"{plugin.package}, {plugin.name} = {plugin.value}")


def _version(plugin: PluginInfo) -> CheckResult:
    try:
        Version(plugin.version)
    except InvalidVersion:
        return CheckResult("version", WARNING, f"{plugin.version!r} is not a valid version")
    return CheckResult("version", "passed", plugin.version)


def _requirements(distribution: Distribution) -> CheckResult:
    name, declared = "requirements", declared_requirements(distribution)
    requirements = []
    for text in declared:
        try:
            requirements.append(Requirement(text))
        except InvalidRequirement as error:
            return CheckResult(name, WARNING, f"{text!r} is not a valid requirement: {error}")
    core = [requirement for requirement in requirements if normalized(requirement.name) == CORE_PACKAGE]
    if not core:
        return CheckResult(name, WARNING, f"{CORE_PACKAGE} is not among the dependencies")
    for requirement in requirements:
        if not {specifier.operator for specifier in requirement.specifier} & {">=", ">", "==", "~="}:
            return CheckResult(name, WARNING, f"{requirement} has no lower bound")
    return CheckResult(name, "passed", ", ".join(map(str, core)))


def _typed(plugin: PluginInfo) -> CheckResult:
    top = plugin.value.partition(":")[0].partition(".")[0]
    found = importlib.util.find_spec(top) if top else None  # None if its metadata cannot be read
    if found is None or found.origin is None:
        return CheckResult("types", WARNING, f"there is no module {top!r}")
    if not Path(found.origin).with_name("py.typed").is_file():
        return CheckResult("types", WARNING, f"{top} has no py.typed, so type checkers ignore its annotations")
    return CheckResult("types", "passed", f"{top}/py.typed")
