"""``rllm-core plugins check``: whether a plugin is what it has to be, found out in child processes with deadlines.

A plugin that hangs, ends its process or crashes is a verdict here, whatever it does.
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

from rllm_core.blame import Place
from rllm_core.cli import CORE_COMMANDS
from rllm_core.cli.packaging import WARNING, packaging_checks
from rllm_core.cli.probe import Health, in_children, probe_all, report, run_child
from rllm_core.discovery import Settings, installed_plugins
from rllm_core.errors import ConfigError, PluginError
from rllm_core.loading import suggest
from rllm_core.plugins import CORE_PACKAGE, FIRST_PARTY, PluginInfo, PluginManager
from rllm_core.providers import KINDS, Backend, Engine, Workflow
from rllm_core.testing.parsers import CheckResult
from rllm_core.types import well_formed

IMPORT_DEADLINE_SECONDS = 30.0
IMPORT_LIMIT_SECONDS = 0.05
INTERPRETERS = 5
MAX_DETAIL_CHARACTERS = 600

PACKAGING = "packaging"
PLUGIN = "plugin"
NEED_OTHERS = frozenset(kind.kind for kind in (Backend, Engine, Workflow))


@dataclass(frozen=True)
class Group:
    """What was found out about the plugin's package, about the plugin itself, or about one of its providers.

    Attributes:
        kind: ``packaging``, ``plugin``, or the kind of the provider.
        name: Of the plugin or the provider.
        checks: In the order they were made.
        failure: Whose code kept them from being made, and where (`rllm_core.blame.Place.to_json`).
    """

    kind: str
    name: str
    checks: tuple[CheckResult, ...]
    failure: dict[str, Any] | None = None

    @property
    def outcome(self) -> str:
        """``failed`` or ``warning`` if one check says so, ``skipped`` if nothing was checked, else ``passed``."""
        outcomes = {check.outcome for check in self.checks}
        return next((worst for worst in ("failed", WARNING, "passed") if worst in outcomes), "skipped")

    def to_json(self) -> dict[str, Any]:
        """Always with the same keys."""
        checks = [asdict(check) for check in self.checks]
        about = {"kind": self.kind, "name": self.name, "outcome": self.outcome, "failure": self.failure}
        return {**about, "checks": checks}


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for.

    Attributes:
        overrides: ``section.key=value`` of ``-o``.
        model: Of ``--model``.
        deadline_seconds: For the checks of one provider.
    """

    overrides: tuple[str, ...]
    model: str
    deadline_seconds: float


def check_plugin(plugin: PluginInfo, others: Sequence[PluginInfo], wishes: Wishes) -> list[Group]:
    """Everything that is found out about a plugin, its packaging first.

    Args:
        plugin: What is checked.
        others: What else is installed; backends, engines and workflows are checked with those of them that are
            available and can be loaded, since their parsers or reward functions may come from there.
        wishes: How it is checked.

    Raises:
        ConfigError: If a setting belongs to nothing the plugin provides.
        PluginError: If it is the core itself.
    """
    if plugin.package == CORE_PACKAGE:
        raise PluginError("the core's own providers are no plugin; name one that rllm-core plugins lists")
    limit = min(IMPORT_DEADLINE_SECONDS, wishes.deadline_seconds)
    [health] = probe_all([plugin], limit)
    about = _imported(health)
    if health.plugin.status == "loaded":
        _check_sections(health, wishes.overrides)
        about.append(_import_time(plugin))
    groups = [
        Group(PACKAGING, plugin.name, tuple(map(_bounded, packaging_checks(plugin, health)))),
        Group(PLUGIN, plugin.name, tuple(map(_bounded, about)), health.plugin.failure),
    ]
    beside: list[PluginInfo] = []
    if any(provided["kind"] in NEED_OTHERS for provided in health.provides):
        beside = [found.plugin for found in probe_all(others, limit) if found.plugin.status == "loaded"]
    checked = in_children(
        lambda provided, running: _checked(plugin, beside, provided, wishes, running), health.provides
    )
    return groups + checked


def _bounded(result: CheckResult) -> CheckResult:
    """What others wrote, as text of a length that can be shown."""
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
    first_party = {(kind.kind, name): CORE_PACKAGE for kind in KINDS for name in core.providers(kind)}
    first_party |= {(kind.kind, name): package for (kind, name), package in FIRST_PARTY.items()}
    taken = [
        f"{kind} {name!r} is provided by {package}"
        for provided in health.provides
        if (package := first_party.get((kind := provided["kind"], name := provided["name"]), plugin.package))
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
            "changes nothing that everybody in the process shares",
        ),
        _verdict("light", "; ".join(health.warnings) or None, "imports nothing that takes seconds"),
    ]


def _import_time(plugin: PluginInfo) -> CheckResult:
    """The best of several fresh interpreters: what else the machine does can only add to it."""
    best = IMPORT_DEADLINE_SECONDS
    for _ in range(INTERPRETERS):
        found = run_child(["import", plugin.value], IMPORT_DEADLINE_SECONDS, set(), module=__name__)
        if isinstance(found, str):
            return CheckResult("import time", "failed", found)
        best = min(best, found["seconds"])
        if best <= IMPORT_LIMIT_SECONDS:
            break
    seen = f"{best * 1e3:.3g} ms on top of the core"
    problem = f"{seen}, and {IMPORT_LIMIT_SECONDS * 1e3:g} ms are allowed: import late what takes long"
    return _verdict("import time", problem if best > IMPORT_LIMIT_SECONDS else None, seen)


def _timed(value: str) -> dict[str, Any]:
    """In the child: how long a plugin's module takes where the core's own modules are there already."""
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
                f"-o: {section!r} is no section of plugin {health.plugin.name!r}; {suggest(section, known)}"
            )


def _checked(
    plugin: PluginInfo,
    beside: Sequence[PluginInfo],
    provided: dict[str, str],
    wishes: Wishes,
    running: set[subprocess.Popen[bytes]],
) -> Group:
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
        place = found.place or Place("", 0, "", plugin.name, plugin.package, plugin.version)
        failed = (_bounded(CheckResult("checks", "failed", found)),)
        return Group(provided["kind"], provided["name"], failed, place.to_json(found))
    results = [CheckResult(**result) for result in found["results"]]
    return Group(provided["kind"], provided["name"], tuple(map(_bounded, results)))


def _results(asked: str) -> dict[str, Any]:
    """In the child: the checks of one provider."""
    import rllm_core.testing.plugin
    from rllm_core.testing.provided import Request, check_provided

    wanted = json.loads(asked)
    loaded = [c for c in installed_plugins() if [c.package, c.name, c.value] in wanted["loaded"]]
    plugins = PluginManager(loaded, Settings(), reserved_commands=CORE_COMMANDS)
    plugins.register(rllm_core.testing.plugin, "testing")
    [kind] = [kind for kind in KINDS if kind.kind == wanted["kind"]]
    provided = plugins.select(kind, f"{wanted['package']}/{wanted['name']}")
    request = Request(overrides=tuple(wanted["overrides"]), model=wanted["model"])
    with tempfile.TemporaryDirectory(prefix="rllm-check-") as folder:
        results = check_provided(plugins, provided, request, Path(folder))
    return {"results": [asdict(result) for result in results]}


if __name__ == "__main__":
    path, mode, argument = sys.argv[1:]
    report(path, lambda: _timed(argument) if mode == "import" else _results(argument))
