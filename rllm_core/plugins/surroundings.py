"""Process-wide state: changes that a plugin makes during import are reported and undone.

Otherwise, a plugin that clears ``os.environ`` would break the next imported plugin, which would get the blame.
"""

from __future__ import annotations

import locale
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

WATCHED_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGPIPE") if hasattr(signal, name)
)
SHOWN_NAMES = 3


@dataclass(frozen=True)
class Surroundings:
    """Snapshot of process-wide state, for comparison after third-party code has run."""

    environ: dict[str, str]
    directory: str | None
    recursion_limit: int
    path: tuple[str, ...]
    arguments: tuple[str, ...]
    handlers: dict[int, Any]
    locale: str
    filters: tuple[Any, ...]
    threads: frozenset[threading.Thread]

    @classmethod
    def now(cls) -> Surroundings:
        """Takes a snapshot of the current state."""
        return cls(
            environ=dict(os.environ),
            directory=_directory(),
            recursion_limit=sys.getrecursionlimit(),
            path=tuple(sys.path),
            arguments=tuple(sys.argv),
            handlers={number: signal.getsignal(number) for number in WATCHED_SIGNALS},
            locale=locale.setlocale(locale.LC_ALL),
            filters=tuple(warnings.filters),
            threads=frozenset(threading.enumerate()),
        )

    def put_back(self, *, strict: bool) -> list[str]:
        """Undoes changes that would affect other code, and describes them. Additions stay: the plugin may need them.

        Args:
            strict: Whether to restore replaced values, too. A large library may have a reason to replace values; a
                plugin's entry module has none.
        """
        changed: list[str] = []
        if sys.getrecursionlimit() < self.recursion_limit:  # first: the code below needs stack depth
            sys.setrecursionlimit(self.recursion_limit)
            changed.append("the recursion limit")
        self._put_back_environ(changed, strict)
        if self.directory is not None and _directory() != self.directory:
            os.chdir(self.directory)
            changed.append("the working directory")
        self._put_back_path(changed, strict)
        if strict and tuple(sys.argv) != self.arguments:
            sys.argv[:] = self.arguments
            changed.append("sys.argv")
        self._put_back_handlers(changed)
        if locale.setlocale(locale.LC_ALL) != self.locale:
            locale.setlocale(locale.LC_ALL, self.locale)
            changed.append("the locale")
        self._put_back_filters(changed)
        return changed

    def left_threads(self) -> list[threading.Thread]:
        """Threads started since the snapshot that keep the process from ending."""
        return [thread for thread in threading.enumerate() if not thread.daemon and thread not in self.threads]

    def _put_back_environ(self, changed: list[str], strict: bool) -> None:
        lost = [name for name in self.environ if name not in os.environ]
        other = [name for name, value in self.environ.items() if os.environ.get(name, value) != value]
        names = [*lost, *(other if strict else ())]
        for name in names:
            os.environ[name] = self.environ[name]
        if names:
            changed.append(f"os.environ ({_some(names)})")

    def _put_back_path(self, changed: list[str], strict: bool) -> None:
        added = [entry for entry in sys.path if entry not in self.path]
        lost = [entry for entry in self.path if entry not in sys.path]
        # The first entries decide which of several modules with the same name the whole process imports.
        if lost or (strict and tuple(sys.path[: len(self.path)]) != self.path):
            sys.path[:] = [*self.path, *added]
            changed.append("sys.path")

    def _put_back_handlers(self, changed: list[str]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # handlers can be changed only in the main thread
        numbers = [number for number, handler in self.handlers.items() if signal.getsignal(number) != handler]
        for number in numbers:
            if self.handlers[number] is not None:  # None: not installed from Python
                signal.signal(number, self.handlers[number])
        if numbers:
            changed.append(f"the handlers of {_some(signal.Signals(number).name for number in numbers)}")

    def _put_back_filters(self, changed: list[str]) -> None:
        """Removes new filters that apply to all warnings. Filters for specific warnings stay."""
        added = [entry for entry in warnings.filters if entry not in self.filters]
        kept = [entry for entry in added if entry[1] is not None or entry[3] is not None or entry[2] is not Warning]
        if tuple(entry for entry in warnings.filters if entry not in kept) != self.filters:
            warnings.resetwarnings()  # also clears the interpreter's cache of the filters
            warnings.filters[:] = [*kept, *self.filters]  # type: ignore[index]
            changed.append("the warnings filters")


def _directory() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - compared as text
    except FileNotFoundError:
        return None


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN_NAMES} more" if len(ordered) > SHOWN_NAMES else ""
    return ", ".join(ordered[:SHOWN_NAMES]) + more
