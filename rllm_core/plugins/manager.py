"""Loads plugins one at a time, sets broken ones aside, selects providers by name, and explains errors.

plugins = PluginManager.from_environment()
plugins.plugins()                           # installed plugins; imports nothing
plugins.providers(Backend)                  # selectable providers; imports the plugins' entry modules
chosen = plugins.select(Backend, "local")   # PluginError says what to do
backend_class = plugins.load(chosen)        # imports the class, and with it torch
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import logging
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Literal, TypeVar

from rllm_core.errors import PluginError, UserError
from rllm_core.plugins.blame import blamed_json, definition, learn, located, place_of
from rllm_core.plugins.discovery import Candidate, Settings, installed_plugins
from rllm_core.plugins.foreign import ended_within
from rllm_core.plugins.loading import LOAD_DEADLINE_SECONDS, HookImplementation, LoadedHooks, suggest
from rllm_core.plugins.sections import WITH_SECTION, disagreement, wrong_model
from rllm_core.providers import (
    BackendProvider,
    CommandProvider,
    EngineProvider,
    ParserProvider,
    Provider,
    RewardFunctionProvider,
    TrackerProvider,
    WorkflowProvider,
    resolve,
)

__all__ = ["PluginError", "PluginInfo", "PluginManager", "Provided", "Status"]

ProviderT = TypeVar("ProviderT", bound=Provider)
Status = Literal["available", "loaded", "disabled", "broken", "conflict"]

MAX_TRACE_CHARACTERS = 8_000

CORE_PLUGIN = "core"
CORE_PACKAGE = "rllm-core"

FIRST_PARTY: dict[tuple[type[Provider], str], str] = {
    (BackendProvider, "local"): "rllm-local",
    (BackendProvider, "tinker"): "rllm-tinker",
    (BackendProvider, "verl"): "rllm-verl",
    (ParserProvider, "chat_template"): "rllm-renderers",
    (ParserProvider, "renderer"): "rllm-renderers",
    (ParserProvider, "tinker"): "rllm-tinker",
    (EngineProvider, "tinker"): "rllm-tinker",
    (TrackerProvider, "mlflow"): "rllm-trackers",
    (TrackerProvider, "swanlab"): "rllm-trackers",
    (TrackerProvider, "tensorboard"): "rllm-trackers",
    (TrackerProvider, "trackio"): "rllm-trackers",
    (TrackerProvider, "wandb"): "rllm-trackers",
    (WorkflowProvider, "calculator"): "rllm-workflows",
    (WorkflowProvider, "countdown"): "rllm-workflows",
    (WorkflowProvider, "dataset"): "rllm-workflows",
    (WorkflowProvider, "guess"): "rllm-workflows",
    (WorkflowProvider, "math"): "rllm-workflows",
    (WorkflowProvider, "solver_judge"): "rllm-workflows",
    (WorkflowProvider, "sort"): "rllm-workflows",
    (RewardFunctionProvider, "contains"): "rllm-workflows",
    (RewardFunctionProvider, "exact_match"): "rllm-workflows",
    (RewardFunctionProvider, "f1"): "rllm-workflows",
    (RewardFunctionProvider, "multiple_choice"): "rllm-workflows",
    (RewardFunctionProvider, "numeric"): "rllm-workflows",
    (CommandProvider, "new"): "rllm-devkit",
    (CommandProvider, "parser check"): "rllm-devkit",
    (CommandProvider, "plugins check"): "rllm-devkit",
    (CommandProvider, "verify"): "rllm-viewer",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PluginInfo:
    """One row of the plugin listing.

    Attributes:
        name: Name of the plugin, which is the name of its entry point.
        package: Distribution.
        version: Version of the distribution.
        value: Module with the hook implementations.
        status: ``available`` (installed and allowed, not imported yet), ``loaded``, ``disabled``, ``broken`` or
            ``conflict``.
        error: Why it is disabled, broken or in conflict, in one line.
        failure: Origin of the error that broke it: ``plugin``, ``distribution``, ``version``, ``file``, ``line`` and
            ``error``.
    """

    name: str
    package: str
    version: str
    value: str
    status: Status
    error: str | None = None
    failure: dict[str, Any] | None = field(default=None, compare=False)

    @property
    def label(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.package} {self.version}".rstrip()

    def to_json(self) -> dict[str, Any]:
        """The row as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Provided(Generic[ProviderT]):
    """A provider record and the plugin it comes from."""

    record: ProviderT
    plugin: PluginInfo

    @contextlib.contextmanager
    def at_work(self, what: str, code: type) -> Iterator[None]:
        """Wraps a call of the provider's code, before anything is allocated.

        Args:
            what: Name of the call, for the message.
            code: Class that is called. The message gives its location if the error has none (e.g. wrong arguments).

        Raises:
            PluginError: In place of any error that is not a `UserError`.
        """
        try:
            yield
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            frame = definition(code)
            if place_of(error) is None and frame is not None:
                error.frames = (frame,)  # type: ignore[union-attr]
            kind, name = self.record.kind, self.record.name
            raise PluginError(
                f"{kind} {name!r} ({self.plugin.label}): {what} failed: {located(error, self.plugin.package)}"
            ) from error

    @property
    def qualified(self) -> str:
        """``distribution/name``, which is unique even if two plugins provide the same name."""
        return f"{self.plugin.package}/{self.record.name}"


class _Plugin:
    """A candidate and its current state."""

    def __init__(self, candidate: Candidate, status: Status = "available", error: str | None = None) -> None:
        self.candidate = candidate
        self.status = status
        self.error = error
        self.failure: BaseException | None = None
        self.records: tuple[Provider, ...] = ()

    @property
    def info(self) -> PluginInfo:
        c = self.candidate
        failure = None if self.failure is None else blamed_json(self.failure, c)
        return PluginInfo(c.name, c.package, c.version, c.value, self.status, self.error, failure)


class PluginManager:
    """The plugins of one process.

    Args:
        candidates: Installed plugins.
        settings: Which of them may be used.
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
        self._plugins = [_Plugin(candidate) for candidate in candidates]
        for plugin in self._plugins:
            refusal = self.settings.refusal(plugin.candidate)
            if refusal is not None:
                plugin.status, plugin.error = "disabled", refusal
            elif plugin.candidate.error is not None:
                plugin.status, plugin.error = "broken", plugin.candidate.error
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
        """Returns all plugins by name, as far as they are known without imports."""
        infos = [plugin.info for plugin in self._plugins]
        if not any(info.name == CORE_PLUGIN and info.package == CORE_PACKAGE for info in infos):
            infos.append(_Plugin(_core_candidate()).info)
        return sorted(infos, key=lambda info: (info.name, info.package, info.value))

    def find(self, name: str) -> list[PluginInfo]:
        """Plugins with a name: usually one, several if they are in conflict.

        Raises:
            PluginError: If there is none.
        """
        found = [info for info in self.plugins() if _as_candidate(info).is_named(name)]
        if not found:
            names = sorted({info.name for info in self.plugins()})
            raise PluginError(f"no plugin named {name!r}; {suggest(name, names)}")
        return found

    def providers(self, kind: type[ProviderT]) -> dict[str, Provided[ProviderT]]:
        """All selectable providers of one kind, by name.

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
        """Returns the provider called ``name`` or ``distribution/name``.

        Raises:
            PluginError: If there is none or more than one, or if its plugin is broken, disabled or in conflict. The
                message lists what exists and says what to do; the cause is chained.
        """
        package, _, short = name.rpartition("/")
        found = [
            provided
            for provided in self._provided(kind)
            if provided.record.name == short
            and (not package or _as_candidate(provided.plugin).is_named(f"{package}/{provided.plugin.name}"))
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
        raise self._not_found(kind, package, short)

    def select_first_party(self, kind: type[ProviderT], name: str) -> Provided[ProviderT]:
        """Returns a provider in `FIRST_PARTY`. Loads only its own distribution, so that no other plugin can interfere.

        Raises:
            PluginError: If the distribution is missing, broken, disabled or in conflict.
        """
        package = FIRST_PARTY[kind, name]
        for plugin in self._plugins:
            if plugin.candidate.package == package:
                self._adopt_installed(plugin)
        for provided in self._selectable(kind):
            if provided.record.name == name and provided.plugin.package == package:
                return provided
        error = self._unusable(kind, package, "", name)
        if error is None:
            from rllm_core.plugins.requirements import pip_install

            install = pip_install(package)
            error = PluginError(
                f"{kind.kind} {name!r} needs {package}, which is not installed; install it with: {install}"
            )
        raise error

    def load(self, provided: Provided[Any], path: str | None = None) -> Any:
        """Imports the object behind a record, and checks that record and class declare the same run-file section.

        Args:
            provided: The selected provider.
            path: Another dotted path of the record, e.g. ``record.config``. Defaults to ``record.load``.

        Raises:
            PluginError: If the import fails; the cause is chained, and the message has the pip command. Also if class
                and record disagree about the section of the run file (`rllm_core.plugins.sections`).
        """
        record = provided.record
        target = path if path is not None else record.load
        found = self._resolved(provided, target)
        if path is None:
            has_section = record.config is not None and isinstance(record, WITH_SECTION)
            wrong = disagreement(record, found, self.load(provided, record.config) if has_section else None)
        else:
            wrong = wrong_model(record, found) if path == record.config else None
        if wrong is not None:
            raise PluginError(f"{record.kind} {record.name!r} ({provided.plugin.label}): {wrong}")
        return found

    def _resolved(self, provided: Provided[Any], target: str) -> Any:
        record, plugin = provided.record, provided.plugin
        described = f"{target} of plugin {plugin.name!r} ({plugin.label})"
        try:
            with (
                self._loaded.foreign_code(described, plugin.name, light=False),
                ended_within(LOAD_DEADLINE_SECONDS),
            ):
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
        added = _Plugin(Candidate(name, name, "", getattr(plugin, "__name__", type(plugin).__name__)))
        self._adopt(added, lambda: plugin)
        if added.status == "broken":
            raise PluginError(f"plugin {name!r} is broken: {added.error}") from added.failure
        self._plugins.append(added)

    def hooks(self, name: str) -> list[str]:
        """Hooks that a loaded plugin implements."""
        self._load_enabled()
        return self._loaded.hooks(name)

    def trace(self, name: str) -> str | None:
        """Traceback of the error that broke a plugin, or None."""
        self._load_enabled()
        failures = [p.failure for p in self._plugins if p.candidate.is_named(name) and p.failure is not None]
        return "".join(traceback.format_exception(failures[0]))[-MAX_TRACE_CHARACTERS:] if failures else None

    def changed(self, name: str) -> list[str]:
        """Process-wide state that a plugin changed while it was loaded. The changes have been undone."""
        self._load_enabled()
        return self._loaded.changed.get(name, [])

    def implementations(self, hook: str) -> list[HookImplementation]:
        """Implementations of an event hook, sorted by plugin name."""
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
        builtin = importlib.import_module("rllm_core.builtin")
        core = _Plugin(_core_candidate())
        self._adopt(core, lambda: builtin)
        if core.failure is not None:
            raise core.failure  # a bug in the core, not in a plugin
        for plugin in self._plugins:
            self._adopt_installed(plugin)
        self._plugins.append(core)
        self._is_loaded = True
        for plugin in self._plugins:
            if plugin.status in ("broken", "conflict"):
                message = f"plugin {plugin.candidate.name!r} ({plugin.candidate.label}): {plugin.error}"
                if self.settings.strict:
                    self._strict_error = PluginError(f"{message} (strict mode)")
                    raise self._strict_error from plugin.failure
                show = plugin.failure if logger.isEnabledFor(logging.DEBUG) else None
                logger.warning("%s", message, exc_info=show)

    def _adopt_installed(self, plugin: _Plugin) -> None:
        if plugin.status == "available":
            point = plugin.candidate.entry_point
            assert point is not None, "only installed plugins are available"
            self._adopt(plugin, point.load)

    def _adopt(self, plugin: _Plugin, load: Callable[[], object]) -> None:
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
        enabled = [p for p in self._plugins if p.status == "available"]
        for plugin in enabled:
            name = plugin.candidate.name
            twins = [p.candidate for p in enabled if p.candidate.name == name]
            if name == CORE_PLUGIN:
                twins.append(_core_candidate())
            if len(twins) > 1:
                labels = " and ".join(f"{twin.label} ({twin.value})" for twin in twins)
                plugin.status = "conflict"
                plugin.error = (
                    f"{labels} both provide a plugin {name!r}, so neither is loaded; uninstall one, "
                    f"or: rllm-core plugins disable {plugin.candidate.qualified}"
                )

    # ----------------------------------------------------------------------------------------------------------------
    # Explaining

    def _not_found(self, kind: type[Provider], package: str, name: str) -> PluginError:
        dist = FIRST_PARTY.get((kind, name))
        error = self._unusable(kind, dist, package, name)
        if error is not None:
            return error
        names = list(self.providers(kind))
        wanted = f"{package}/{name}" if package else name
        parts = [f"no {kind.kind} named {wanted!r}"]
        if dist is not None and not package:
            from rllm_core.plugins.requirements import pip_install

            parts.append(f"install it with: {pip_install(dist)}")
            parts.append("installed: " + (", ".join(names) or "none"))
        else:
            known = [*names, *(first for owner, first in FIRST_PARTY if owner is kind and first not in names)]
            near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
            if near:
                parts.append(f"did you mean {near[0]!r}?")
            parts.append("installed: " + (", ".join(names) or "none"))
        broken = [p for p in self._plugins if p.status in ("broken", "conflict")]
        if broken:
            parts.append("not usable: " + "; ".join(f"{p.candidate.label}: {p.error}" for p in broken))
        error = PluginError("; ".join(parts))
        if len(broken) == 1:
            error.__cause__ = broken[0].failure
        return error

    def _unusable(self, kind: type[Provider], dist: str | None, package: str, name: str) -> PluginError | None:
        """The reason if the plugin that probably has the provider is installed, but cannot be used."""
        for plugin in self._plugins:
            c = plugin.candidate
            is_meant = c.is_named(f"{package}/{c.name}") if package else c.name == name or c.package == dist
            if is_meant and plugin.status in ("broken", "conflict", "disabled"):
                state = "in conflict" if plugin.status == "conflict" else plugin.status
                error = PluginError(f"{kind.kind} {name!r}: plugin {c.name!r} ({c.label}) is {state}: {plugin.error}")
                error.__cause__ = plugin.failure
                return error
        return None

    def _how_to_mend(self, plugin: PluginInfo, error: BaseException) -> str:
        from rllm_core.plugins.requirements import remedy

        for known in self._plugins:
            if known.info.package == plugin.package and known.candidate.entry_point is not None:
                found = remedy(known.candidate, error)
                return f"; {found}" if found is not None else ""
        return ""


def _core_candidate() -> Candidate:
    from rllm_core.version import __version__

    return Candidate(CORE_PLUGIN, CORE_PACKAGE, __version__, "rllm_core.builtin")


def _as_candidate(info: PluginInfo) -> Candidate:
    return Candidate(info.name, info.package, info.version, info.value)
