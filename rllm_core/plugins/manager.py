"""Loads plugins one at a time, sets broken ones aside, selects providers by name, and explains errors.

plugins = PluginManager.from_environment()
plugins.plugins()                           # installed plugins; imports nothing
plugins.providers(Backend)                  # selectable providers; imports the plugins' entry modules
chosen = plugins.select(Backend, "local")   # PluginError says what to do
backend_class = plugins.load(chosen)        # imports the class, and with it torch
"""

from __future__ import annotations

import importlib
import logging
import traceback
from collections.abc import Callable, Collection, Iterable
from typing import Any

from rllm_core.errors import PluginError
from rllm_core.file_references import is_class_reference, is_file_reference
from rllm_core.plugins.blame import learn, located
from rllm_core.plugins.discovery import Candidate, installed_plugins, normalized
from rllm_core.plugins.listing import Plugin, PluginInfo, Provided, ProviderT
from rllm_core.plugins.loading import HookImplementation, LoadedHooks, suggest
from rllm_core.plugins.sections import WITH_SECTION, breach, disagreement, wrong_model
from rllm_core.plugins.settings import Settings
from rllm_core.providers import Provider, resolve
from rllm_core.version import __version__

MAX_TRACE_CHARACTERS = 8_000

CORE_PLUGIN = "core"
CORE_PACKAGE = "rllm-core"
CORE_MODULE = "rllm_core.builtin"

logger = logging.getLogger(__name__)


class PluginManager:
    """The plugins of one process.

    Args:
        candidates: Installed plugins.
        settings: Rules for which candidates may be used.
        reserved_commands: Command names that plugins must not use.

    Raises:
        PluginError: In strict mode, if a requested plugin is not installed.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate] = (),
        settings: Settings | None = None,
        *,
        reserved_commands: Collection[str] = (),
    ) -> None:
        self.settings = settings or Settings()
        self._loaded = LoadedHooks(reserved_commands=reserved_commands, trace=self.settings.trace)
        self._is_loaded = False
        self._strict_error: PluginError | None = None
        candidates = tuple(candidates)
        learn(candidates)
        self._core = Plugin(Candidate(CORE_PLUGIN, CORE_PACKAGE, __version__, CORE_MODULE))
        self._plugins = [*map(Plugin, candidates)]
        self._of_user: dict[tuple[type[Provider], str], Provided[Any]] = {}
        for plugin in self._plugins:
            reason = self.settings.reason_disabled(plugin.candidate)
            if reason is not None:
                plugin.status, plugin.error = "disabled", reason
            elif plugin.candidate.error is not None:
                plugin.status, plugin.error = "broken", plugin.candidate.error
        self._plugins.append(self._core)
        self._mark_conflicts()
        for source, name in self.settings.unknown(candidates):
            names = sorted({c.name for c in candidates})
            message = f"{source} names {name!r}, which is not installed; {suggest(name, names)}"
            if self.settings.strict:
                raise PluginError(message)
            logger.warning("%s", message)

    @classmethod
    def from_environment(
        cls,
        *,
        no_plugins: bool | Collection[str] = False,
        strict: bool | None = None,
        reserved_commands: Collection[str] = (),
    ) -> PluginManager:
        """Finds the installed plugins that the environment and ``plugins.toml`` allow. Imports none of them.

        Args:
            no_plugins: Plugins to disable: all, none, or these names.
            strict: Overrides ``RLLM_PLUGINS_STRICT``.
            reserved_commands: Command names that plugins must not use.

        Raises:
            PluginError: If a variable or ``plugins.toml`` is invalid.
        """
        settings = Settings.from_environment(no_plugins=no_plugins, strict=strict)
        return cls(installed_plugins(), settings, reserved_commands=reserved_commands)

    # ----------------------------------------------------------------------------------------------------------------
    # Listing and selecting

    def plugins(self) -> list[PluginInfo]:
        """Returns all plugins, sorted by name, with the information that needs no imports."""
        infos = [plugin.info for plugin in self._plugins]
        return sorted(infos, key=lambda info: (info.name, info.package, info.value))

    def find(self, name: str) -> list[PluginInfo]:
        """Returns the plugins with a name: usually one, several if they are in conflict.

        Raises:
            PluginError: If there is none.
        """
        found = [plugin.info for plugin in self._plugins if plugin.candidate.is_named(name)]
        if not found:
            names = sorted({plugin.candidate.name for plugin in self._plugins})
            raise PluginError(f"no plugin named {name!r}; {suggest(name, names)}")
        return found

    def providers(self, kind: type[ProviderT]) -> dict[str, Provided[ProviderT]]:
        """Returns all selectable providers of one kind, by name.

        If two plugins provide the same name, both appear under their qualified names, ``distribution/name``.

        Args:
            kind: A record class of `rllm_core.providers`.

        Raises:
            PluginError: In strict mode, if any enabled plugin is broken or in conflict.
        """
        by_name: dict[str, list[Provided[ProviderT]]] = {}
        for provided in self._provided(kind):
            by_name.setdefault(provided.record.name, []).append(provided)
        named: dict[str, Provided[ProviderT]] = {}
        for name, provided_by in by_name.items():
            for provided in provided_by:
                named[name if len(provided_by) == 1 else provided.qualified] = provided
        return dict(sorted(named.items()))

    def select(self, kind: type[ProviderT], name: str) -> Provided[ProviderT]:
        """Returns the provider called ``name`` or ``distribution/name``, or a provider of the user.

        ``/path/file.py:NAME`` names a provider in a file, ``python:NAME`` a class of this program.

        Raises:
            PluginError: If there is none or more than one, or if its plugin is broken, disabled or in conflict. The
                message lists the available providers and the next step; the cause is chained.
        """
        if is_file_reference(name) or is_class_reference(name):
            return self._of_the_user(kind, name)
        package, _, short = name.rpartition("/")
        found = [
            provided
            for provided in self._provided(kind)
            if provided.record.name == short
            and (not package or normalized(provided.plugin.package) == normalized(package))
        ]
        if len(found) == 1:
            return found[0]
        if found:
            owners = " and ".join(f"{p.plugin.label} (plugin {p.plugin.name!r})" for p in found)
            forms = " or ".join(repr(p.qualified) for p in found)
            raise PluginError(
                f"{kind.kind} {name!r} is provided by {owners}; choose {forms}, "
                f"or disable one: rllm-core plugins disable {found[-1].plugin.name}"
            )
        from rllm_core.plugins.missing import not_found  # only errors need it

        raise not_found(kind, short, package, self._plugins, list(self.providers(kind)))

    def _of_the_user(self, kind: type[ProviderT], reference: str) -> Provided[ProviderT]:
        from rllm_core.plugins.classes import provided_by_class
        from rllm_core.plugins.files import provided_by_file

        if (kind, reference) not in self._of_user:
            provided_by = provided_by_class if is_class_reference(reference) else provided_by_file
            self._of_user[kind, reference] = provided_by(kind, reference)
        return self._of_user[kind, reference]

    @property
    def sources(self) -> list[str]:
        """Files and classes of the user that have been loaded in place of plugins, each once."""
        return list(dict.fromkeys(provided.plugin.value for provided in self._of_user.values()))

    def select_first_party(self, kind: type[ProviderT], name: str) -> Provided[ProviderT]:
        """Returns a provider in `first_party`. Loads only its own distribution, so that no other plugin can interfere.

        Raises:
            PluginError: If the distribution is missing, broken, disabled or in conflict.
        """
        from rllm_core.plugins.missing import first_party, not_installed

        package = first_party()[kind, name]
        for plugin in self._plugins:
            if plugin.candidate.package == package:
                self._adopt_installed(plugin)
        for provided in self._selectable(kind):
            if provided.record.name == name and provided.plugin.package == package:
                return provided
        raise not_installed(kind, name, package, self._plugins)

    def load(self, provided: Provided[Any], path: str | None = None) -> Any:
        """Imports the object that a record names, and checks that a run can use it as a provider of its kind.

        Args:
            provided: The selected provider.
            path: Another dotted path of the record, e.g. ``record.config``. Defaults to ``record.load``.

        Raises:
            PluginError: If the import fails; the cause is chained, and the message has the pip command. Also if the
                object violates the contract of its kind, or if class and record disagree about the section of the run
                file (`rllm_core.plugins.sections`).
        """
        record = provided.record
        if path is not None and path != record.load:
            found = self._resolved(provided, path)
            wrong = wrong_model(record, found) if path == record.config else None
        else:
            found = self._resolved(provided, record.load)
            contract = self._resolved(provided, record.contract) if record.contract else None
            wrong = breach(record, found, contract)
            if wrong is None:
                has_section = record.config is not None and isinstance(record, WITH_SECTION)
                wrong = disagreement(record, found, self.load(provided, record.config) if has_section else None)
        if wrong is not None:
            raise PluginError(f"{record.kind} {record.name!r} ({provided.plugin.label}): {wrong}")
        return found

    def _resolved(self, provided: Provided[Any], target: str) -> Any:
        record, plugin = provided.record, provided.plugin
        described = f"{target} of plugin {plugin.name!r} ({plugin.label})"
        try:
            with self._loaded.foreign_code(described, plugin.name, light=False):
                return resolve(target)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise PluginError(
                f"{record.kind} {record.name!r} ({plugin.label}) cannot be loaded from {target}: "
                f"{located(error, plugin.package)}{self._how_to_mend(plugin, error)}"
            ) from error

    def register(self, plugin: object, name: str) -> None:
        """Adds a plugin that is not installed: an object or module with hook implementations.

        Raises:
            PluginError: If the name is taken or the plugin is broken.
        """
        self._load_enabled()
        if any(p.candidate.name == name and p.status in ("loaded", "conflict") for p in self._plugins):
            raise PluginError(f"a plugin named {name!r} is already registered")
        added = Plugin(Candidate(name, name, "", getattr(plugin, "__name__", type(plugin).__name__)))
        self._adopt(added, lambda: plugin)
        if added.status == "broken":
            raise PluginError(f"plugin {name!r} is broken: {added.error}") from added.failure
        self._plugins.append(added)

    def hooks(self, name: str) -> list[str]:
        """Returns the hooks that a loaded plugin implements."""
        self._load_enabled()
        return self._loaded.hooks(name)

    def trace(self, name: str) -> str | None:
        """Returns the traceback of the error that broke a plugin, or None."""
        self._load_enabled()
        failures = [p.failure for p in self._plugins if p.candidate.is_named(name) and p.failure is not None]
        return "".join(traceback.format_exception(failures[0]))[-MAX_TRACE_CHARACTERS:] if failures else None

    def changed(self, name: str) -> list[str]:
        """Returns the process-wide state that a plugin changed while it was loaded. The changes have been undone."""
        self._load_enabled()
        return self._loaded.changed.get(name, [])

    def implementations(self, hook: str) -> list[HookImplementation]:
        """Returns the implementations of an event hook, sorted by plugin name."""
        self._load_enabled()
        return self._loaded.implementations(hook)

    # ----------------------------------------------------------------------------------------------------------------
    # Loading

    def _load_enabled(self) -> None:
        """Loads every enabled plugin once, by name. Broken plugins are set aside and reported."""
        if self._is_loaded:
            if self._strict_error is not None:
                raise self._strict_error
            return
        self._adopt(self._core, lambda: importlib.import_module(CORE_MODULE))
        if self._core.failure is not None:
            raise self._core.failure  # a bug in the core, not in a plugin
        for plugin in self._plugins:
            self._adopt_installed(plugin)
        self._is_loaded = True
        for plugin in self._plugins:
            if plugin.status in ("broken", "conflict"):
                message = f"plugin {plugin.candidate.name!r} ({plugin.candidate.label}): {plugin.error}"
                if self.settings.strict:
                    self._strict_error = PluginError(f"{message} (strict mode)")
                    raise self._strict_error from plugin.failure
                show = plugin.failure if logger.isEnabledFor(logging.DEBUG) else None
                logger.warning("%s", message, exc_info=show)

    def _adopt_installed(self, plugin: Plugin) -> None:
        if plugin.status == "available":
            point = plugin.candidate.entry_point
            assert point is not None, "only installed plugins are available"
            self._adopt(plugin, point.load)

    def _adopt(self, plugin: Plugin, load: Callable[[], object]) -> None:
        """Adds one plugin, or records why it is broken."""
        c = plugin.candidate
        try:
            plugin.records = self._loaded.add(c.name, load, f"plugin {c.name!r} ({c.label})")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin that calls sys.exit() is broken, but the process continues
            plugin.status, plugin.failure = "broken", error
            plugin.error = located(error, c.package) + self._how_to_mend(plugin.info, error)
        else:
            plugin.status = "loaded"

    def _provided(self, kind: type[ProviderT]) -> list[Provided[ProviderT]]:
        self._load_enabled()
        return self._selectable(kind)

    def _selectable(self, kind: type[ProviderT]) -> list[Provided[ProviderT]]:
        return [
            Provided(record, plugin.info)
            for plugin in sorted(self._plugins, key=lambda p: p.candidate.name)
            for record in plugin.records
            if isinstance(record, kind) and plugin.status == "loaded"
        ]

    def _mark_conflicts(self) -> None:
        enabled = [plugin for plugin in self._plugins if plugin.status == "available"]
        for plugin in enabled:
            name = plugin.candidate.name
            twins = [p.candidate for p in enabled if p.candidate.name == name]
            if len(twins) > 1 and plugin is not self._core:
                labels = " and ".join(f"{twin.label} ({twin.value})" for twin in twins)
                plugin.status = "conflict"
                plugin.error = (
                    f"{labels} both provide a plugin {name!r}, so neither is loaded; uninstall one, "
                    f"or: rllm-core plugins disable {plugin.candidate.qualified}"
                )

    def _how_to_mend(self, plugin: PluginInfo, error: BaseException) -> str:
        from rllm_core.plugins.requirements import remedy

        for known in self._plugins:
            if known.info.package == plugin.package and known.candidate.entry_point is not None:
                found = remedy(known.candidate, error)
                return f"; {found}" if found is not None else ""
        return ""
