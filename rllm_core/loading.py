"""Import one plugin and hold it against the contract of the hooks: it gets in as a whole, or not at all."""

from __future__ import annotations

import contextlib
import difflib
import faulthandler
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

from rllm_core import API_VERSION, __version__, hookspecs
from rllm_core.errors import ApiVersionError, PluginError
from rllm_core.foreign import ended_within, streams_kept
from rllm_core.providers import KINDS, Command, Provider
from rllm_core.surroundings import Surroundings
from rllm_core.witness import STANDARD_ERROR, WITNESS

ProviderT = TypeVar("ProviderT", bound=Provider)

DECLARED_API_VERSION = "RLLM_CORE_API"
SLOW_IMPORT_SECONDS = 30.0
PLUGIN_DEADLINE_SECONDS = 120.0
LOAD_DEADLINE_SECONDS = 900.0  # of a class, and with it libraries that take minutes on a network disk
HELD_SECONDS = 20.0  # after the deadline of what cannot be interrupted, for it holds the interpreter

_API_VERSION_PATTERN = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")

LEFT_THREADS: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
"""Threads that keep the process from ending, by the plugin whose import has started them."""

LEFT_HANDLERS: list[str] = []
"""Plugins whose import has registered exit handlers."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HookImplementation:
    """One plugin's implementation of an event hook, and the arguments it wants."""

    plugin: str
    function: Callable[..., object]
    arguments: tuple[str, ...]


class LoadedHooks:
    """The hooks of every plugin that got in.

    Args:
        reserved_commands: Names a plugin's command must not take.
        trace: Whether every import and hook call is printed on stderr.

    Attributes:
        changed: What plugins have changed that everybody shares while they were loaded, by name.
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
        """Import, register, check and question one plugin.

        Args:
            name: Name of the plugin, not yet taken.
            load: Imports it and returns the object with the hook implementations.
            described: What messages call it.

        Returns:
            The records it provides.

        Raises:
            BaseException: Whatever is wrong with the plugin; then nothing of it is registered.
        """
        try:
            with self.foreign_code(described, name, light=True), ended_within(PLUGIN_DEADLINE_SECONDS):
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
        """Names of the hooks a plugin implements."""
        plugin = self._pluggy.get_plugin(name)
        return sorted(caller.name for caller in self._pluggy.get_hookcallers(plugin) or ()) if plugin else []

    def implementations(self, hook: str) -> list[HookImplementation]:
        """The implementations of a hook in the order of the plugins' names; pluggy's own order is that of loading."""
        caller: pluggy.HookCaller = getattr(self._pluggy.hook, hook)
        found = [
            HookImplementation(impl.plugin_name, impl.function, (*impl.argnames, *impl.kwargnames))
            for impl in caller.get_hookimpls()
        ]
        return sorted(found, key=lambda implementation: implementation.plugin)

    @contextlib.contextmanager
    def foreign_code(self, described: str, plugin: str, *, light: bool) -> Iterator[None]:
        """Plugins' code runs in here.

        What it prints goes to stderr, since stdout may be read by a program; a slow import is reported; what it
        changes that everybody shares is put back, and it is named for it.

        Args:
            described: What is loaded, for messages.
            plugin: Name of the plugin it belongs to.
            light: Whether it is the plugin's own module, and not a class with the libraries it needs.
        """
        start, before = time.perf_counter(), Surroundings.now()
        timer = threading.Timer(SLOW_IMPORT_SECONDS, _tell_slow, (described, plugin, light, threading.get_ident()))
        timer.daemon = True
        timer.start()
        way_out = f"to disable the plugin: rllm-core plugins disable {plugin}, or RLLM_NO_PLUGINS={plugin}"
        try:
            with streams_kept(), WITNESS.loading(described, way_out), _ended_if_held(light=light):
                yield
        finally:
            timer.cancel()
            changed = before.put_back(strict=light)
            if changed:
                self.changed.setdefault(plugin, []).extend(changed)
                logger.warning(
                    "%s changed %s while it was loaded; the change was undone", described, ", ".join(changed)
                )
            for thread in before.left_threads():
                LEFT_THREADS.setdefault(thread, plugin)
            if light and before.has_new_exit_handlers():
                LEFT_HANDLERS.append(plugin)
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
        """Every record of every provider hook of one plugin, checked."""
        others = [plugin for other, plugin in self._pluggy.list_name_plugin() if other != name]
        for kind in KINDS:
            seen: set[str] = set()
            for answer in self._pluggy.subset_hook_caller(kind.hook, others)():
                for record in _checked(kind, answer):
                    if record.name in seen:
                        raise PluginError(f"{kind.hook}() returned two records named {record.name!r}")
                    if isinstance(record, Command) and record.name in self._reserved_commands:
                        raise PluginError(f"its command {record.name!r} has the name of a built-in command")
                    seen.add(record.name)
                    yield record


@contextlib.contextmanager
def _ended_if_held(*, light: bool) -> Iterator[None]:
    """End the process, and say where it is, if a plugin's module holds the interpreter so that nothing can stop it."""
    if not (light and WITNESS.is_called):
        yield
        return
    faulthandler.dump_traceback_later(PLUGIN_DEADLINE_SECONDS + HELD_SECONDS, exit=True, file=STANDARD_ERROR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _tell_slow(described: str, plugin: str, light: bool, thread: int) -> None:
    """Say what is being loaded, and where that is by now."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    where = f", now at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
    hint = f"if it never ends: rllm-core plugins disable {plugin}" if light else "large libraries can take minutes"
    logger.warning("still importing %s after %g s%s; %s", described, SLOW_IMPORT_SECONDS, where, hint)


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
    """Hold what a plugin says it was written for against what this core has.

    Args:
        declared: ``"MAJOR.MINOR"``; None of a plugin that says nothing, which is taken as it is.

    Raises:
        ApiVersionError: If the major version is another, or the minor one is higher than this core's.
        PluginError: If it is no version.
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
    """The nearest known name as a question, or all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else "known: " + (", ".join(known) or "none")


def _trace_before(hook: str, implementations: Sequence[pluggy.HookImpl], arguments: Mapping[str, Any]) -> None:
    names = ", ".join(implementation.plugin_name for implementation in implementations)
    print(f"[plugins] {hook}({', '.join(arguments)}) -> {names or 'no plugin'}", file=sys.stderr)


def _trace_after(outcome: pluggy.Result[Any], hook: str, implementations: object, arguments: object) -> None:
    shown = outcome.exception or outcome.get_result()
    print(f"[plugins] {hook} returned {shown!r}", file=sys.stderr)
