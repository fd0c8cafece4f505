"""Imports one plugin and checks it against the hooks' contract. A plugin is registered as a whole or not at all."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import logging
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pluggy

from rllm_core import hookspecs
from rllm_core.errors import ApiVersionError, PluginError
from rllm_core.plugins.surroundings import Surroundings
from rllm_core.plugins.watch import watched
from rllm_core.providers import KINDS, CommandProvider, Provider
from rllm_core.version import API_VERSION, __version__

ProviderT = TypeVar("ProviderT", bound=Provider)

DECLARED_API_VERSION = "RLLM_CORE_API"

_API_VERSION_PATTERN = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")

LEFT_THREADS: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
"""Threads that keep the process from ending, mapped to the plugin whose import started them."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HookImplementation:
    """One plugin's implementation of an event hook, and the arguments it takes."""

    plugin: str
    function: Callable[..., object]
    arguments: tuple[str, ...]


class LoadedHooks:
    """Hooks of all loaded plugins.

    Args:
        reserved_commands: Command names that plugins must not use.
        trace: Whether every import and hook call is printed on stderr.

    Attributes:
        changed: Process-wide state that plugins changed while they were loaded, by plugin name.
    """

    def __init__(self, *, reserved_commands: Collection[str] = (), trace: bool = False) -> None:
        self._reserved_commands = frozenset(reserved_commands)
        self._trace = trace
        self.changed: dict[str, list[str]] = {}
        self._pluggy = pluggy.PluginManager(hookspecs.PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        if trace:
            self._pluggy.add_hookcall_monitoring(_trace_before, _trace_after)

    def add(self, name: str, load: Callable[[], object], described: str) -> tuple[Provider, ...]:
        """Imports, registers and checks one plugin; returns the records that its provider hooks return.

        Args:
            name: Name of the plugin, not yet in use.
            load: Function that imports the plugin and returns the object with the hook implementations.
            described: Description of the plugin for messages.

        Raises:
            BaseException: Any error of the plugin, none of whose hooks then stay registered.
        """
        try:
            with self.foreign_code(described, name, light=True):
                plugin = load()
                check_api_version(getattr(plugin, DECLARED_API_VERSION, None))
                self._pluggy.register(plugin, name)
                self._check_hooks(plugin, name)
                return tuple(self._ask(name))
        except BaseException:
            if self._pluggy.has_plugin(name):
                self._pluggy.unregister(name=name)
            raise

    def hooks(self, name: str) -> list[str]:
        """Names of the hooks that a plugin implements."""
        plugin = self._pluggy.get_plugin(name)
        return sorted(caller.name for caller in self._pluggy.get_hookcallers(plugin) or ()) if plugin else []

    def implementations(self, hook: str) -> list[HookImplementation]:
        """Implementations of a hook, sorted by plugin name; pluggy itself sorts by loading order."""
        caller: pluggy.HookCaller = getattr(self._pluggy.hook, hook)
        found = [
            HookImplementation(impl.plugin_name, impl.function, (*impl.argnames, *impl.kwargnames))
            for impl in caller.get_hookimpls()
        ]
        return sorted(found, key=lambda implementation: implementation.plugin)

    @contextlib.contextmanager
    def foreign_code(self, described: str, plugin: str, *, light: bool) -> Iterator[None]:
        """Context in which code of plugins runs.

        A slow import is reported. Changes to process-wide state are undone and reported with the plugin's name.
        ``light`` code is a plugin's entry module, not a class with the libraries it needs.
        """
        start, before = time.perf_counter(), Surroundings.now()
        try:
            with watched(described, plugin, light=light):
                yield
        finally:
            changed = before.put_back(strict=light)
            if changed:
                self.changed.setdefault(plugin, []).extend(changed)
                logger.warning(
                    "%s changed %s while it was loaded; the change was undone", described, ", ".join(changed)
                )
            for thread in before.left_threads():
                LEFT_THREADS.setdefault(thread, plugin)
            if self._trace:
                print(f"[plugins] {described}: {(time.perf_counter() - start) * 1e3:.1f} ms", file=sys.stderr)

    def _check_hooks(self, plugin: object, name: str) -> None:
        callers = self._pluggy.get_hookcallers(plugin) or []
        known = [hook for hook, spec in vars(hookspecs).items() if hasattr(spec, f"{hookspecs.PROJECT}_spec")]
        if not callers:
            raise PluginError(f"it implements no hook; decorate one of {', '.join(known)} with @rllm_core.hookimpl")
        for caller in callers:
            for impl in caller.get_hookimpls():
                if impl.plugin_name != name:
                    continue
                if not caller.has_spec() and not impl.optionalhook:
                    hint = suggest(caller.name, known)
                    raise PluginError(f"it implements a hook {caller.name!r}, which does not exist; {hint}")
                if impl.wrapper or impl.hookwrapper:
                    raise PluginError(
                        f"its {caller.name}() is a hook wrapper; only plain implementations are supported"
                    )

    def _ask(self, name: str) -> Iterator[Provider]:
        """Yields all records of a plugin's provider hooks, checked."""
        others = [plugin for other, plugin in self._pluggy.list_name_plugin() if other != name]
        for kind in KINDS:
            seen: set[str] = set()
            for answer in self._pluggy.subset_hook_caller(kind.hook, others)():
                for record in _checked(kind, answer):
                    if record.name in seen:
                        raise PluginError(f"{kind.hook}() returned two records named {record.name!r}")
                    if isinstance(record, CommandProvider) and record.name in self._reserved_commands:
                        raise PluginError(f"its command {record.name!r} has the name of a built-in command")
                    seen.add(record.name)
                    yield record


def _checked(kind: type[ProviderT], answer: object) -> list[ProviderT]:
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


def check_api_version(declared: object) -> None:
    """Checks a plugin's declared API version against this core's.

    Args:
        declared: ``"MAJOR.MINOR"``, or None if the plugin declares no version, which is accepted.

    Raises:
        ApiVersionError: If the major version differs, or the minor version is higher than this core's.
        PluginError: If ``declared`` is not a version.
    """
    if declared is None:
        return
    match = _API_VERSION_PATTERN.fullmatch(declared) if isinstance(declared, str) else None
    if match is None:
        raise PluginError(f'its {DECLARED_API_VERSION} is {declared!r:.80}, not "MAJOR.MINOR" such as "{API_VERSION}"')
    major, minor = (int(number) for number in match.groups())
    core_major, core_minor = (int(number) for number in API_VERSION.split("."))
    if major != core_major or minor > core_minor:
        raise ApiVersionError(
            f"it was written for version {declared} of the plugin API, but rllm-core {__version__} has {API_VERSION}",
            is_core_older=(major, minor) > (core_major, core_minor),
        )


def suggest(name: str, known: Collection[str]) -> str:
    """Suggests the nearest known name, or lists all known names."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else "known: " + (", ".join(known) or "none")


def _trace_before(hook: str, implementations: Sequence[pluggy.HookImpl], arguments: Mapping[str, Any]) -> None:
    names = ", ".join(implementation.plugin_name for implementation in implementations)
    print(f"[plugins] {hook}({', '.join(arguments)}) -> {names or 'no plugin'}", file=sys.stderr)


def _trace_after(outcome: pluggy.Result[Any], hook: str, implementations: object, arguments: object) -> None:
    shown = outcome.exception or outcome.get_result()
    print(f"[plugins] {hook} returned {shown!r}", file=sys.stderr)
