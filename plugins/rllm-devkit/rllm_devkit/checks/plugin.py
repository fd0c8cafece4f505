"""Checks a whole plugin and its package, in child processes with timeouts.

A plugin that hangs, exits or crashes fails its check without affecting this process.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rllm_core.cli import CORE_COMMANDS
from rllm_core.errors import ConfigError, PluginError
from rllm_core.plugins import CORE_PACKAGE, PluginInfo, PluginManager
from rllm_core.plugins.blame import CodePlace
from rllm_core.plugins.discovery import installed_plugins
from rllm_core.plugins.loading import suggest
from rllm_core.plugins.missing import first_party
from rllm_core.plugins.probe import Health, in_children, probe_all, report, run_child
from rllm_core.plugins.settings import Settings
from rllm_core.providers import KINDS, BackendProvider, EngineProvider, WorkflowProvider
from rllm_core.types import well_formed
from rllm_devkit.checks.packaging import WARNING, packaging_checks
from rllm_devkit.checks.results import CheckResult

IMPORT_DEADLINE_SECONDS = 30.0
IMPORT_LIMIT_SECONDS = 0.05
INTERPRETERS = 5
MAX_DETAIL_CHARACTERS = 600

PACKAGING = "packaging"
PLUGIN = "plugin"
NEED_OTHERS = frozenset(kind.kind for kind in (BackendProvider, EngineProvider, WorkflowProvider))


@dataclass(frozen=True)
class ResultGroup:
    """Results for the plugin's package, for the plugin itself, or for one of its providers.

    Attributes:
        kind: ``packaging``, ``plugin``, or the kind of the provider.
        name: Name of the plugin or the provider.
        checks: Results, in the order of the checks.
        failure: Code that prevented the checks, and where it failed (`rllm_core.plugins.blame.Place.to_json`).
    """

    kind: str
    name: str
    checks: tuple[CheckResult, ...]
    failure: dict[str, Any] | None = None

    @property
    def outcome(self) -> str:
        """``failed`` or ``warning`` if a check has that outcome, ``skipped`` if none ran, otherwise ``passed``."""
        outcomes = {check.outcome for check in self.checks}
        return next((worst for worst in ("failed", WARNING, "passed") if worst in outcomes), "skipped")

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON object, always with the same keys."""
        checks = [asdict(check) for check in self.checks]
        about = {"kind": self.kind, "name": self.name, "outcome": self.outcome, "failure": self.failure}
        return {**about, "checks": checks}


@dataclass(frozen=True)
class Wishes:
    """Options from the command line.

    Attributes:
        overrides: ``section.key=value`` from ``-o``.
        model: Model from ``--model``.
        deadline_seconds: Timeout for the checks of one provider.
    """

    overrides: tuple[str, ...]
    model: str
    deadline_seconds: float


def check_plugin(plugin: PluginInfo, others: Sequence[PluginInfo], wishes: Wishes) -> list[ResultGroup]:
    """Checks a plugin: its packaging, then the plugin itself, then its providers.

    Args:
        plugin: Plugin to check.
        others: Other installed plugins. Those that load are available in the checks of backends, engines and
            workflows, whose parsers or reward functions they may provide.
        wishes: Options from the command line.

    Raises:
        ConfigError: If a setting belongs to no provider of the plugin.
        PluginError: If the plugin is the core itself.
    """
    if plugin.package == CORE_PACKAGE:
        raise PluginError("the core's own providers are not a plugin; choose one from rllm-core plugins")
    limit = min(IMPORT_DEADLINE_SECONDS, wishes.deadline_seconds)
    [health] = probe_all([plugin], limit, CORE_COMMANDS)
    about = _imported(health)
    if health.plugin.status == "loaded":
        _check_sections(health, wishes.overrides)
        about.append(_import_time(plugin))
    groups = [
        ResultGroup(PACKAGING, plugin.name, tuple(map(_bounded, packaging_checks(plugin, health)))),
        ResultGroup(PLUGIN, plugin.name, tuple(map(_bounded, about)), health.plugin.failure),
    ]
    beside: list[PluginInfo] = []
    if any(provided["kind"] in NEED_OTHERS for provided in health.provides):
        beside = [found.plugin for found in probe_all(others, limit, CORE_COMMANDS) if found.plugin.status == "loaded"]
    checked = in_children(
        lambda provided, running: _checked(plugin, beside, provided, wishes, running), health.provides
    )
    return groups + checked


def _bounded(result: CheckResult) -> CheckResult:
    """Sanitizes and shortens text from third parties."""
    detail = " ".join(well_formed(result.detail).split())
    if len(detail) > MAX_DETAIL_CHARACTERS:
        detail = f"{detail[: MAX_DETAIL_CHARACTERS - 3]}..."
    return CheckResult(result.name, result.outcome, detail)


def _verdict(name: str, problem: str | None, seen: str) -> CheckResult:
    return CheckResult(name, "passed", seen) if problem is None else CheckResult(name, "failed", problem)


# --------------------------------------------------------------------------------------------------------------------
# The import


def _imported(health: Health) -> list[CheckResult]:
    plugin = health.plugin
    if plugin.status != "loaded":
        return [CheckResult("import", "failed", plugin.error or plugin.status)]
    core = PluginManager()
    owners = {(kind.kind, name): CORE_PACKAGE for kind in KINDS for name in core.providers(kind)}
    owners |= {(kind.kind, name): package for (kind, name), package in first_party().items()}
    taken = [
        f"{kind} {name!r} is provided by {package}"
        for provided in health.provides
        if (package := owners.get((kind := provided["kind"], name := provided["name"]), plugin.package))
        != plugin.package
    ]
    provides = ", ".join(f"{provided['kind']} {provided['name']!r}" for provided in health.provides)
    return [
        CheckResult("import", "passed", plugin.value),
        CheckResult("hooks", "passed", ", ".join(health.hooks)),
        _verdict("providers", "; ".join(taken) or None, provides or "none"),
        _verdict(
            "surroundings",
            f"changes {', '.join(health.changed)} when it is loaded" if health.changed else None,
            "changes no process-wide state",
        ),
        _verdict("light", "; ".join(health.warnings) or None, "imports no slow module"),
    ]


def _import_time(plugin: PluginInfo) -> CheckResult:
    """Measures the shortest import time over several fresh interpreters, because other load can only add to it."""
    best = IMPORT_DEADLINE_SECONDS
    for _ in range(INTERPRETERS):
        found = run_child(["import", plugin.value], IMPORT_DEADLINE_SECONDS, set(), module=__name__)
        if isinstance(found, str):
            return CheckResult("import time", "failed", found)
        best = min(best, found["seconds"])
        if best <= IMPORT_LIMIT_SECONDS:
            break
    seen = f"{best * 1e3:.3g} ms on top of the core"
    limit = f"the limit is {IMPORT_LIMIT_SECONDS * 1e3:g} ms"
    problem = f"{seen}; {limit}. Move slow imports into the functions that need them"
    return _verdict("import time", problem if best > IMPORT_LIMIT_SECONDS else None, seen)


def _timed(value: str) -> dict[str, Any]:
    """Runs in the child process: measures the import of a plugin's module after the core's own modules."""
    PluginManager().providers(KINDS[0])
    begin = time.perf_counter()
    importlib.import_module(value.partition(":")[0])
    return {"seconds": time.perf_counter() - begin}


# --------------------------------------------------------------------------------------------------------------------
# Providers


def _check_sections(health: Health, overrides: Sequence[str]) -> None:
    from rllm_core.config import RunConfig
    from rllm_core.run_file import apply_override

    tables: dict[str, Any] = {}
    for override in overrides:
        apply_override(tables, override)
    known = [*(provided["name"] for provided in health.provides), *RunConfig.model_fields]
    for section in tables:
        if section not in known:
            raise ConfigError(
                f"-o: plugin {health.plugin.name!r} has no section {section!r}; {suggest(section, known)}"
            )


def _checked(
    plugin: PluginInfo,
    beside: Sequence[PluginInfo],
    provided: dict[str, str],
    wishes: Wishes,
    running: set[subprocess.Popen[bytes]],
) -> ResultGroup:
    loaded = [plugin, *(beside if provided["kind"] in NEED_OTHERS else ())]
    asked = {
        "package": plugin.package,
        "loaded": [[info.package, info.name, info.value] for info in loaded],
        "kind": provided["kind"],
        "name": provided["name"],
        "overrides": wishes.overrides,
        "model": wishes.model,
    }
    what = f"the check of {provided['kind']} {provided['name']!r}"
    found = run_child(["provider", json.dumps(asked)], wishes.deadline_seconds, running, module=__name__, what=what)
    if isinstance(found, str):
        place = found.place or CodePlace("", 0, "", plugin.name, plugin.package, plugin.version)
        failed = (_bounded(CheckResult("checks", "failed", found)),)
        return ResultGroup(provided["kind"], provided["name"], failed, place.to_json(found))
    results = [CheckResult(**result) for result in found["results"]]
    return ResultGroup(provided["kind"], provided["name"], tuple(map(_bounded, results)))


def _results(asked: str) -> dict[str, Any]:
    """Runs in the child process: runs the checks of one provider."""
    import rllm_devkit.scripted_plugin
    from rllm_devkit.checks.provided import Request, check_provided

    wanted = json.loads(asked)
    loaded = [c for c in installed_plugins() if [c.package, c.name, c.value] in wanted["loaded"]]
    plugins = PluginManager(loaded, Settings(), reserved_commands=CORE_COMMANDS)
    plugins.register(rllm_devkit.scripted_plugin, "testing")
    [kind] = [kind for kind in KINDS if kind.kind == wanted["kind"]]
    provided = plugins.select(kind, f"{wanted['package']}/{wanted['name']}")
    request = Request(overrides=tuple(wanted["overrides"]), model=wanted["model"])
    with tempfile.TemporaryDirectory(prefix="rllm-check-") as folder:
        results = check_provided(plugins, provided, request, Path(folder))
    return {"results": [asdict(result) for result in results]}


if __name__ == "__main__":
    path, mode, argument = sys.argv[1:]
    report(path, lambda: _timed(argument) if mode == "import" else _results(argument))
