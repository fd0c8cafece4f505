"""Reports events of a run to plugins, without letting a plugin stop the run.

Observers are called one after another, by plugin name. An ``async def`` observer is awaited on the event loop. A plain
one runs in its plugin's worker thread, so a plugin gets its events in order and never concurrently. Each call has a
deadline and gets its own copies: an observer that changes a reward changes only its copy. State that plugins need after
a resume is saved and restored in the same way.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import inspect
import logging
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any, TypeVar

import numpy as np

from rllm_core import hookspecs
from rllm_core.config import RunConfig
from rllm_core.messages import FrozenDict, FrozenList, MessageView
from rllm_core.plugins import PluginManager
from rllm_core.plugins.blame import blamed
from rllm_core.plugins.loading import HookImplementation
from rllm_core.records import Record
from rllm_core.returned_values import json_object
from rllm_core.text import MAX_TEXT_CHARACTERS, printable_lines
from rllm_core.third_party_calls import CallThread, DeadlineExceeded, within

logger = logging.getLogger(__name__)

_Copies = dict[int, tuple[object, object]]  # by id of the original, which is kept alive so that its id is not reused
_IMMUTABLE = (str, int, float, bytes, PurePath, FrozenDict, FrozenList, MessageView)
AcceptedT = TypeVar("AcceptedT")
SAVE, LOAD = "save_plugin_state", "load_plugin_state"
REMARKS, CLOSING = "remarks", "closing_lines"
MAX_LINES = 60
CLOSING_DEADLINE_SECONDS = 60.0  # longer: nothing waits for these lines, and a plugin may be drawing


class Observers:
    """Event hooks of one run.

    Plugins registered after construction are not called.

    Args:
        plugins: Source of the implementations. Enabled plugins are loaded.
        deadline_seconds: Time limit of one observer call, except of those that close the run.

    Attributes:
        failures: Number of failed and overrun calls by plugin name.
        first_failures: Description of each plugin's first failure.
        disabled: Plugins that overran their deadline. They are not called again.
    """

    def __init__(self, plugins: PluginManager, *, deadline_seconds: float = 10.0) -> None:
        self.deadline_seconds = deadline_seconds
        self.failures: Counter[str] = Counter()
        self.first_failures: dict[str, str] = {}
        self.disabled: set[str] = set()
        self._trace = plugins.settings.trace
        self._implementations = {
            hook: tuple(plugins.implementations(hook))
            for hook in vars(hookspecs)
            if hook.startswith("on_") or hook in (SAVE, LOAD, REMARKS, CLOSING)
        }
        names = {implementation.plugin for found in self._implementations.values() for implementation in found}
        self._turns = {name: asyncio.Lock() for name in names}
        self._owners = {info.name: info for info in plugins.plugins() if info.status == "loaded"}
        self._copies: dict[str, _Copies] = {name: {} for name in names}
        self._workers: dict[str, CallThread] = {}

    def active(self, hook: str) -> bool:
        """Whether any plugin observes ``hook``."""
        return any(implementation.plugin not in self.disabled for implementation in self._implementations[hook])

    async def notify(self, hook: str, **arguments: Any) -> None:
        """Calls every observer of an event hook with all arguments of its spec, until each has returned or failed."""
        for implementation in self._implementations[hook]:
            await self._call(hook, implementation, arguments, _done)

    async def lines(self, hook: str, **arguments: Any) -> list[str]:
        """Collects the lines of a remark hook from all plugins."""
        said: list[str] = []
        for implementation in self._implementations[hook]:
            said += await self._call(hook, implementation, arguments, _lines) or ()
        return said

    async def save_states(self, state: object) -> dict[str, dict[str, Any] | None]:
        """Collects plugin states with the hook ``save_plugin_state``: by name; None if it saves nothing or failed."""
        answers: dict[str, dict[str, Any] | None] = {}
        implementations = self._implementations[SAVE]
        for plugin, times in Counter(implementation.plugin for implementation in implementations).items():
            if times > 1:
                self._report(SAVE, plugin, TypeError(f"implemented {times} times, but a checkpoint holds one state"))
                answers[plugin] = None
        for implementation in implementations:
            plugin = implementation.plugin
            if plugin not in answers and plugin not in self.disabled:
                answers[plugin] = await self._call(SAVE, implementation, {"state": state}, _state)
        return answers

    async def load_states(self, state: object, saved: Mapping[str, dict[str, Any]]) -> set[str]:
        """Passes saved states back with the hook ``load_plugin_state``; returns the plugins that restored theirs."""
        taken = set()
        for implementation in self._implementations[LOAD]:
            plugin = implementation.plugin
            if plugin in saved:
                arguments = {"state": state, "saved": saved[plugin]}
                if await self._call(LOAD, implementation, arguments, _done):
                    taken.add(plugin)
        return taken

    def names(self, hook: str) -> list[str]:
        """Names of the plugins that implement ``hook``."""
        return sorted({implementation.plugin for implementation in self._implementations[hook]})

    async def _call(
        self,
        hook: str,
        implementation: HookImplementation,
        arguments: Mapping[str, Any],
        accept: Callable[[object], AcceptedT],
    ) -> AcceptedT | None:
        """Returns ``accept(result)``. None if the call or ``accept`` failed, or the plugin is disabled."""
        plugin, accepted = implementation.plugin, None
        limit = CLOSING_DEADLINE_SECONDS if hook == CLOSING else self.deadline_seconds
        given = {name: arguments[name] for name in implementation.arguments}
        if plugin in self.disabled:
            return None
        try:  # Copy here, not in the thread: the copies must show the run at this moment.
            wanted = {name: private(value, self._copies[plugin]) for name, value in given.items()}
        except Exception as error:  # a plugin's own Episode class may fail to copy
            self._report(hook, plugin, error)
            return None
        async with self._turns[plugin]:
            if plugin in self.disabled:
                return None
            start = time.monotonic()
            try:
                accepted = accept(await self._result_of(implementation, wanted, limit))
            except DeadlineExceeded:
                self._disable(hook, plugin, limit)
            except Exception as error:
                self._report(hook, plugin, error)
            if self._trace:
                print(f"[plugins] {hook} -> {plugin}: {(time.monotonic() - start) * 1e3:.1f} ms", file=sys.stderr)
        return accepted

    async def _result_of(self, implementation: HookImplementation, wanted: Mapping[str, Any], limit: float) -> object:
        call: Callable[[], Any] = functools.partial(implementation.function, **wanted)
        start, context = time.monotonic(), contextvars.copy_context()
        if inspect.iscoroutinefunction(implementation.function):
            result = await within(limit, call())
            if time.monotonic() - start > limit:
                raise DeadlineExceeded  # it blocked the event loop, where no timeout could stop it
            return result
        worker = self._worker(implementation.plugin)
        result = await worker.call(functools.partial(context.run, call), limit)
        if inspect.isawaitable(result):
            result = await within(limit - (time.monotonic() - start), result)
        return result

    def _worker(self, plugin: str) -> CallThread:
        if plugin not in self._workers:
            worker = self._workers[plugin] = CallThread(f"observer-{plugin}")
            worker.start()
            weakref.finalize(self, worker.close)
        return self._workers[plugin]

    def _disable(self, hook: str, plugin: str, seconds: float) -> None:
        self.failures[plugin] += 1
        self.first_failures.setdefault(plugin, f"{hook} took longer than {seconds:g} s")
        self.disabled.add(plugin)
        late = "plugin %r: %s took longer than %g s; its observers are disabled for the rest of the run"
        logger.warning(late, plugin, hook, seconds)

    def _report(self, hook: str, plugin: str, error: Exception) -> None:
        self.failures[plugin] += 1
        count = self.failures[plugin]
        message = f"{hook} failed: {blamed(error, self._owners.get(plugin))}"
        self.first_failures.setdefault(plugin, message)
        if str(count).strip("0") != "1" and hook not in (SAVE, LOAD):
            return  # report failures 1, 10, 100, ... only: an observer that always fails must not flood the log
        times = f" ({count} failures so far)" if count > 1 else ""
        show = error if logger.isEnabledFor(logging.DEBUG) else None
        logger.warning("%s%s", message, times, exc_info=show)


def private(value: Any, kept: _Copies) -> Any:
    """Returns a copy that shares no mutable data with ``value``.

    ``kept`` caches copies of objects that never change, such as the run file.
    """
    if value is None or isinstance(value, _IMMUTABLE):
        return value
    if isinstance(value, np.ndarray):
        copied = value.copy()
        copied.setflags(write=False)
        return copied
    if isinstance(value, Record):
        record = value.model_copy()
        for name in record.__dict__:
            record.__dict__[name] = private(getattr(value, name), kept)
        if record.__pydantic_private__:
            object.__setattr__(record, "__pydantic_private__", copy.deepcopy(record.__pydantic_private__))
        return record
    if type(value) in (list, tuple):
        return type(value)(private(content, kept) for content in value)
    if type(value) is dict:
        return {key: private(content, kept) for key, content in value.items()}
    if isinstance(value, RunConfig):
        if id(value) not in kept:
            kept[id(value)] = (value, copy.deepcopy(value))
        return kept[id(value)][1]
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{field.name: private(getattr(value, field.name), kept) for field in fields(value)})
    return copy.deepcopy(value)


def _done(result: object) -> bool:
    return True


def _lines(answer: object) -> list[str]:
    """Returns the lines of a remark hook, without terminal control characters.

    Raises:
        TypeError: If they are not a list of texts; a generator would run here, without a deadline.
    """
    found = [] if answer is None else answer
    if not isinstance(found, list) or not all(isinstance(line, str) for line in found):
        raise TypeError(f"it must return a list of lines, or None; got {answer!r:.80}")
    return [printable_lines(line[:MAX_TEXT_CHARACTERS].replace("\n", " ")) for line in found[:MAX_LINES]]


def _state(answer: object) -> dict[str, Any] | None:
    """Returns a copy of a plugin's state.

    Raises:
        ValueError: If a checkpoint would not restore it unchanged.
    """
    return None if answer is None else json_object(answer, f"{SAVE}()")
