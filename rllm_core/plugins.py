"""Load plugins one at a time, keep the broken ones apart, select providers by name, explain what went wrong.

plugins = PluginManager.from_environment()
plugins.plugins()                           # what is installed; imports nothing
plugins.providers(Backend)                  # what can be selected; imports the light modules
chosen = plugins.select(Backend, "local")   # PluginError says what to do
backend_class = plugins.load(chosen)        # imports the class, and with it torch
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, TypeVar

import pluggy

from rllm_core import hookspecs
from rllm_core.discovery import Candidate, Settings, installed_plugins
from rllm_core.errors import PluginError
from rllm_core.providers import KINDS, Backend, Command, Engine, Parser, Provider, Workflow

__all__ = ["PluginError", "PluginInfo", "PluginManager", "Provided", "Status"]

ProviderT = TypeVar("ProviderT", bound=Provider)
Status = Literal["available", "loaded", "disabled", "broken", "conflict"]

CORE_PLUGIN = "core"
CORE_PACKAGE = "rllm-core"

FIRST_PARTY: dict[tuple[type[Provider], str], str] = {
    (Backend, "local"): "rllm-local",
    (Backend, "tinker"): "rllm-tinker",
    (Backend, "verl"): "rllm-verl",
    (Parser, "chat_template"): "rllm-renderers",
    (Parser, "renderer"): "rllm-renderers",
    (Parser, "tinker"): "rllm-tinker",
    (Engine, "tinker"): "rllm-tinker",
    (Workflow, "countdown"): "rllm-workflows",
    (Workflow, "guess"): "rllm-workflows",
    (Workflow, "sort"): "rllm-workflows",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PluginInfo:
    """One row of the listing.

    Attributes:
        name: Name of the plugin: its entry point's.
        package: Distribution.
        version: Version of the distribution.
        value: Module with the hook implementations.
        status: ``available`` (installed and allowed, not imported yet), ``loaded``, ``disabled``, ``broken`` or
            ``conflict``.
        error: Why it is disabled, broken or in conflict, in one line.
    """

    name: str
    package: str
    version: str
    value: str
    status: Status
    error: str | None = None

    @property
    def label(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.package} {self.version}".rstrip()

    def to_json(self) -> dict[str, str | None]:
        """The row as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Provided(Generic[ProviderT]):
    """A provider record and the plugin it comes from."""

    record: ProviderT
    plugin: PluginInfo

    @property
    def qualified(self) -> str:
        """``distribution/name``, which works where two plugins provide one name."""
        return f"{self.plugin.package}/{self.record.name}"


@dataclass(frozen=True)
class HookImplementation:
    """One plugin's implementation of an event hook, and the arguments it wants."""

    plugin: str
    function: Callable[..., object]
    arguments: tuple[str, ...]


class _Plugin:
    """A candidate and what has become of it."""

    def __init__(self, candidate: Candidate, status: Status = "available", error: str | None = None) -> None:
        self.candidate = candidate
        self.status = status
        self.error = error
        self.failure: BaseException | None = None
        self.records: tuple[Provider, ...] = ()

    @property
    def info(self) -> PluginInfo:
        c = self.candidate
        return PluginInfo(c.name, c.package, c.version, c.value, self.status, self.error)


class PluginManager:
    """The plugins of one process.

    Args:
        candidates: What is installed.
        settings: What of it may be used.
        reserved_commands: Names a plugin's command must not take.

    Raises:
        PluginError: In strict mode, if a name that was asked for is not installed.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate] = (),
        settings: Settings | None = None,
        *,
        reserved_commands: Collection[str] = (),
    ) -> None:
        self.settings = settings or Settings()
        self._reserved_commands = frozenset(reserved_commands)
        self._pluggy = pluggy.PluginManager(hookspecs.PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        self._is_loaded = False
        self._strict_error: PluginError | None = None
        candidates = tuple(candidates)
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
            message = f"{source} names {name!r}, which is not installed; {_suggest(name, names)}"
            if self.settings.strict:
                raise PluginError(message)
            logger.warning("%s", message)
        if self.settings.trace:
            self._pluggy.add_hookcall_monitoring(_trace_before, _trace_after)

    @classmethod
    def from_environment(
        cls,
        *,
        no_plugins: bool | Collection[str] = False,
        strict: bool | None = None,
        reserved_commands: Collection[str] = (),
    ) -> PluginManager:
        """The plugins installed here, as the environment and ``plugins.toml`` allow them. Imports none of them.

        Args:
            no_plugins: Plugins to leave out: all, none, or these names.
            strict: Overrides ``RLLM_PLUGINS_STRICT``.
            reserved_commands: Names a plugin's command must not take.

        Raises:
            PluginError: If a variable or ``plugins.toml`` cannot be understood.
        """
        settings = Settings.from_environment(no_plugins=no_plugins, strict=strict)
        return cls(installed_plugins(), settings, reserved_commands=reserved_commands)

    # ----------------------------------------------------------------------------------------------------------------
    # What is there

    def plugins(self) -> list[PluginInfo]:
        """Every plugin in the order of names, as far as is known by now. Imports nothing."""
        infos = [plugin.info for plugin in self._plugins]
        if not any(info.name == CORE_PLUGIN and info.package == CORE_PACKAGE for info in infos):
            infos.append(_Plugin(_core_candidate()).info)
        return sorted(infos, key=lambda info: (info.name, info.package, info.value))

    def find(self, name: str) -> list[PluginInfo]:
        """The plugins a name means: one as a rule, several if they are in conflict.

        Raises:
            PluginError: If there is none.
        """
        found = [info for info in self.plugins() if _as_candidate(info).is_named(name)]
        if not found:
            names = sorted({info.name for info in self.plugins()})
            raise PluginError(f"no plugin named {name!r}; {_suggest(name, names)}")
        return found

    def providers(self, kind: type[ProviderT]) -> dict[str, Provided[ProviderT]]:
        """Everything of one kind that can be selected, by name.

        Where two plugins provide the same name, both appear under their qualified names, ``distribution/name``.

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
        """The provider called ``name`` or ``distribution/name``.

        Raises:
            PluginError: If there is none, or more than one, or its plugin is broken, disabled or in conflict. The
                message says what exists and what to do; the cause is chained.
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

    def load(self, provided: Provided[Any], path: str | None = None) -> Any:
        """Import what a record points at.

        Args:
            provided: The selected provider.
            path: Another dotted path of the record, e.g. ``record.config``; by default ``record.load``.

        Raises:
            PluginError: If it cannot be imported; the cause is chained, the message has the pip command.
        """
        target = path if path is not None else provided.record.load
        module_name, _, attributes = target.partition(":")
        try:
            with self._importing(target):
                found: Any = importlib.import_module(module_name)
                for attribute in attributes.split("."):
                    found = getattr(found, attribute)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise PluginError(
                f"{provided.record.kind} {provided.record.name!r} ({provided.plugin.label}) cannot be loaded from "
                f"{target}: {_one_line(error)}{self._how_to_mend(provided.plugin, error)}"
            ) from error
        return found

    def register(self, plugin: object, name: str) -> None:
        """Add a plugin that is not installed: an object or module with hook implementations.

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
        """The hooks a loaded plugin implements."""
        self._load_enabled()
        plugin = self._pluggy.get_plugin(name)
        return sorted(caller.name for caller in self._pluggy.get_hookcallers(plugin) or ()) if plugin else []

    def implementations(self, hook: str) -> list[HookImplementation]:
        """The implementations of an event hook, in the order of the plugins' names."""
        self._load_enabled()
        caller: pluggy.HookCaller = getattr(self._pluggy.hook, hook)
        return sorted(
            (
                HookImplementation(impl.plugin_name, impl.function, (*impl.argnames, *impl.kwargnames))
                for impl in caller.get_hookimpls()
            ),
            key=lambda implementation: implementation.plugin,
        )

    # ----------------------------------------------------------------------------------------------------------------
    # Loading

    def _load_enabled(self) -> None:
        """Load every enabled plugin once, in the order of names; what fails is kept apart and reported."""
        if self._is_loaded:
            if self._strict_error is not None:
                raise self._strict_error
            return
        builtin = importlib.import_module("rllm_core.builtin")
        core = _Plugin(_core_candidate())
        self._adopt(core, lambda: builtin)
        if core.failure is not None:
            raise core.failure  # a bug of the core, not a plugin's
        for plugin in self._plugins:
            if plugin.status == "available":
                point = plugin.candidate.entry_point
                assert point is not None, "only installed plugins are available"
                self._adopt(plugin, point.load)
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

    def _adopt(self, plugin: _Plugin, load: Callable[[], object]) -> None:
        """Import, register, check and question one plugin; all of it counts, or none."""
        name = plugin.candidate.name
        try:
            with self._importing(f"plugin {name} = {plugin.candidate.value} ({plugin.candidate.label})"):
                module = load()
                self._pluggy.register(module, name)
                self._check_hooks(module, name)
                plugin.records = tuple(self._ask(name))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            if self._pluggy.has_plugin(name):
                self._pluggy.unregister(name=name)
            plugin.status, plugin.failure = "broken", error
            plugin.error = _one_line(error) + self._how_to_mend(plugin.info, error)
        else:
            plugin.status = "loaded"

    def _check_hooks(self, module: object, name: str) -> None:
        callers = self._pluggy.get_hookcallers(module) or []
        known = [hook for hook in vars(hookspecs) if hasattr(getattr(hookspecs, hook), f"{hookspecs.PROJECT}_spec")]
        if not callers:
            raise PluginError(f"it implements no hook; decorate one of {', '.join(known)} with @rllm_core.hookimpl")
        for caller in callers:
            for impl in caller.get_hookimpls():
                if impl.plugin_name != name:
                    continue
                if not caller.has_spec() and not impl.optionalhook:
                    raise PluginError(
                        f"it implements a hook {caller.name!r}, which does not exist; " + _suggest(caller.name, known)
                    )
                if impl.wrapper or impl.hookwrapper:
                    raise PluginError(f"its {caller.name}() is a hook wrapper; only plain implementations are called")

    def _ask(self, name: str) -> Iterator[Provider]:
        """Every record of every provider hook of one plugin, checked."""
        others = [plugin for other, plugin in self._pluggy.list_name_plugin() if other != name]
        for kind in KINDS:
            seen: set[str] = set()
            for answer in self._pluggy.subset_hook_caller(kind.hook, others)():
                for record in _checked_records(kind, answer):
                    if record.name in seen:
                        raise PluginError(f"{kind.hook}() returned two records named {record.name!r}")
                    if isinstance(record, Command) and record.name in self._reserved_commands:
                        raise PluginError(f"its command {record.name!r} has the name of one of the core's own")
                    seen.add(record.name)
                    yield record

    def _provided(self, kind: type[ProviderT]) -> list[Provided[ProviderT]]:
        self._load_enabled()
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
                    f"{labels} both name a plugin {name!r}, so neither is loaded; uninstall one, "
                    f"or: rllm-core plugins disable {plugin.candidate.qualified}"
                )

    @contextlib.contextmanager
    def _importing(self, what: str) -> Iterator[None]:
        """Foreign code runs in here: what it prints goes to stderr, since stdout may be read by a program."""
        start = time.perf_counter()
        with contextlib.redirect_stdout(sys.stderr):
            try:
                yield
            finally:
                if self.settings.trace:
                    print(f"[plugins] {what}: {(time.perf_counter() - start) * 1e3:.1f} ms", file=sys.stderr)

    # ----------------------------------------------------------------------------------------------------------------
    # Explaining

    def _not_found(self, kind: type[Provider], package: str, name: str) -> PluginError:
        dist = FIRST_PARTY.get((kind, name))
        unusable = [p for p in self._plugins if p.status in ("broken", "conflict", "disabled")]
        for plugin in unusable:
            c = plugin.candidate
            if not (c.is_named(f"{package}/{c.name}") if package else c.name == name or c.package == dist):
                continue
            state = "in conflict" if plugin.status == "conflict" else plugin.status
            error = PluginError(f"{kind.kind} {name!r}: plugin {c.name!r} ({c.label}) is {state}: {plugin.error}")
            error.__cause__ = plugin.failure
            return error
        names = list(self.providers(kind))
        wanted = f"{package}/{name}" if package else name
        parts = [f"no {kind.kind} named {wanted!r}"]
        if dist is not None and not package:
            from rllm_core.requirements import pip_install

            parts.append(f"it comes with: {pip_install(dist)}")
            parts.append("installed: " + (", ".join(names) or "none"))
        else:
            known = [*names, *(first for owner, first in FIRST_PARTY if owner is kind and first not in names)]
            near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
            if near:
                parts.append(f"did you mean {near[0]!r}?")
            parts.append("installed: " + (", ".join(names) or "none"))
        broken = [p for p in unusable if p.status != "disabled"]
        if broken:
            parts.append("not usable: " + "; ".join(f"{p.candidate.label}: {p.error}" for p in broken))
        error = PluginError("; ".join(parts))
        if len(broken) == 1:
            error.__cause__ = broken[0].failure
        return error

    def _how_to_mend(self, plugin: PluginInfo, error: BaseException) -> str:
        from rllm_core.requirements import mend_command

        for known in self._plugins:
            if known.info.package == plugin.package and known.candidate.entry_point is not None:
                return f"; to mend it: {mend_command(known.candidate, error)}"
        return ""


def _checked_records(kind: type[ProviderT], answer: object) -> list[ProviderT]:
    if inspect.iscoroutine(answer):
        answer.close()
        raise PluginError(f"{kind.hook}() is async; provider hooks are plain functions")
    if isinstance(answer, Provider | str) or not isinstance(answer, Iterable):
        raise PluginError(f"{kind.hook}() returned {answer!r:.80}, not a list of {kind.__name__} records")
    records = list(answer)
    for record in records:
        if not isinstance(record, kind):
            raise PluginError(
                f"{kind.hook}() returned {record!r:.80} in its list, which is not a {kind.__name__} record"
            )
    return records


def _core_candidate() -> Candidate:
    from rllm_core import __version__

    return Candidate(CORE_PLUGIN, CORE_PACKAGE, __version__, "rllm_core.builtin")


def _as_candidate(info: PluginInfo) -> Candidate:
    return Candidate(info.name, info.package, info.version, info.value)


def _suggest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else "known: " + (", ".join(known) or "none")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, PluginError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _trace_before(hook: str, implementations: Sequence[pluggy.HookImpl], arguments: Mapping[str, Any]) -> None:
    names = ", ".join(implementation.plugin_name for implementation in implementations)
    print(f"[plugins] {hook}({', '.join(arguments)}) -> {names or 'nobody'}", file=sys.stderr)


def _trace_after(outcome: pluggy.Result[Any], hook: str, implementations: object, arguments: object) -> None:
    shown = outcome.exception or outcome.get_result()
    print(f"[plugins] {hook} returned {shown!r}", file=sys.stderr)
