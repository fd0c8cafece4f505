"""Finds the origin of an error: plugin, distribution and line.

place = place_of(error)             # the last frame outside the core and libraries
str(place)                          # "plugin 'maze' (rllm-maze 1.2), rllm_maze/env.py:41"
blamed(error)                       # the same, followed by the error
blamed_json(error)                  # the same for --json

Most of a traceback is the core, asyncio and pydantic. Users need the last line of their own code.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

from rllm_core.plugins.discovery import Candidate, installed_plugins
from rllm_core.text import one_line, printable

CORE = "rllm_core"
SITE_FOLDERS = frozenset({"site-packages", "dist-packages"})
MAX_CHAIN = 16
DUMP_BEGINS = "(most recent call first):\n"

_learned: dict[tuple[str, str, str], Candidate] = {}


@dataclass(frozen=True)
class CodePlace:
    """A line in a plugin's or the user's code.

    Attributes:
        file: Path starting at the package (``rllm_maze/env.py``). For files outside packages, relative to the working
            directory if the file is below it, else absolute.
        line: Line number, from 1, or 0 if only the plugin is known.
        plugin: Plugin that the code belongs to. None if it belongs to no plugin, or to one of several in a package.
        distribution: Distribution that the code belongs to, or None if unknown.
    """

    file: str
    line: int
    function: str
    plugin: str | None = None
    distribution: str | None = None
    version: str | None = None

    def __str__(self) -> str:
        label = f"{self.distribution} {self.version or ''}".rstrip() if self.distribution else ""
        owner = f"plugin {self.plugin!r}" + (f" ({label})" if label else "") if self.plugin else label
        return ", ".join(filter(None, [owner, self.where]))

    def to_json(self, error: str) -> dict[str, Any]:
        """As JSON, with the error and always the keys ``plugin``, ``distribution``, ``version``, ``file``, ``line``."""
        keys = ("plugin", "distribution", "version", "file", "line")
        return {key: getattr(self, key) or None for key in keys} | {"error": error}

    @property
    def where(self) -> str:
        """``file:line``, or "" if only the plugin is known."""
        return f"{printable(self.file)}:{self.line}" if self.line else ""

    @property
    def in_function(self) -> str:
        """``file:line in function()``."""
        return f"{self.where} in {self.function}()"


class _Owner(Protocol):
    """A plugin known to have been running: a candidate, or its row in the listing."""

    @property
    def name(self) -> str: ...
    @property
    def package(self) -> str: ...
    @property
    def version(self) -> str: ...


class Frame(NamedTuple):
    """One level of a traceback, in a form that can be sent to another process."""

    file: str
    line: int
    function: str
    module: str

    @classmethod
    def of(cls, frame: FrameType, line: int | None = None) -> Frame:
        """Describes a frame of this process; ``line`` is another line than the current one."""
        code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
        return cls(code.co_filename, frame.f_lineno if line is None else line, code.co_name, module)


def learn(candidates: Iterable[Candidate]) -> None:
    """Makes plugins known to `place_of` that are not installed, such as those of a manager built by hand."""
    for candidate in candidates:
        key = (candidate.package, candidate.name, candidate.value)
        if key not in _learned:
            _learned[key] = candidate
            _owners.cache_clear()


def place_of(error: BaseException) -> CodePlace | None:
    """Returns the last line of plugin or user code in an error's traceback, or None.

    Searches causes and groups if the traceback itself contains only the core and libraries.
    """
    return place_among(_frames(error))


def place_among(frames: Iterable[Frame]) -> CodePlace | None:
    """Returns the first frame in plugin or user code; ``frames`` are sorted innermost first."""
    return next((place for frame in frames if (place := _place(frame)) is not None), None)


def passed_through(error: BaseException, *packages: str) -> bool:
    """Whether the traceback of an error passes through one of the packages."""
    inside = tuple(f"{package}." for package in packages)
    return any(f"{frame.module}.".startswith(inside) for frame in _frames(error))


def place_in(dump: str) -> CodePlace | None:
    """Like `place_of`, for output of `faulthandler`. Falls back to the last frame in any code."""
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', dump.rpartition(DUMP_BEGINS)[2], flags=re.MULTILINE)
    frames = [Frame(file, int(line), function, _module_of(file)) for file, line, function in found]
    for frame in frames:
        if (place := _place(frame)) is not None:
            return place
    return CodePlace(frames[0].file, frames[0].line, frames[0].function) if frames else None


def defined_at(what: Callable[..., Any] | type) -> CodePlace | None:
    """Returns where a function or class is defined; None if the place is unknown, or in the core or a library."""
    frame = definition(what)
    return _place(frame) if frame is not None else None


def definition(what: Callable[..., Any] | type) -> Frame | None:
    """Returns the first line of a function, or of a class's first method, as a frame for ``error.frames``."""
    module = str(getattr(what, "__module__", "") or "")
    function = getattr(what, "__wrapped__", what)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is not None:
        return Frame(code.co_filename, code.co_firstlineno, code.co_name, module)
    if isinstance(what, type):
        for found in vars(what).values():
            code = getattr(getattr(found, "__func__", found), "__code__", None)
            if code is not None and getattr(found, "__module__", None) == module:
                return Frame(code.co_filename, code.co_firstlineno, what.__name__, module)
    return None


def blamed(error: BaseException, owner: _Owner | None = None) -> str:
    """Returns one line with the plugin, the location and the error.

    Names ``owner``, which was running, if the traceback leads to no plugin.
    """
    return ": ".join(filter(None, [str(_known(error, owner) or ""), one_line(error)]))


def located(error: BaseException, distribution: str | None = None) -> str:
    """Returns ``file:line`` and the error. Names the plugin only if it is not from ``distribution``."""
    place = place_of(error)
    if place is None:
        return one_line(error)
    return f"{place.where if place.distribution in (None, distribution) else place}: {one_line(error)}"


def blamed_json(error: BaseException, owner: _Owner | None = None) -> dict[str, Any]:
    """Like `blamed`, always with the keys ``plugin``, ``distribution``, ``version``, ``file``, ``line``, ``error``."""
    return (_known(error, owner) or CodePlace("", 0, "")).to_json(one_line(error))


def _known(error: BaseException, owner: _Owner | None) -> CodePlace | None:
    place = place_of(error)
    if owner is None or (place is not None and place.plugin is not None):
        return place
    if place is None:
        return CodePlace("", 0, "", owner.name, owner.package, owner.version)
    if place.distribution in (None, owner.package):  # several plugins share the package, or the code is in none
        return CodePlace(place.file, place.line, place.function, owner.name, owner.package, owner.version)
    return place


# --------------------------------------------------------------------------------------------------------------------
# Frames


def _frames(error: BaseException) -> Iterator[Frame]:
    """Yields the frames of an error, innermost first, then those of its causes."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    raised: list[Frame] = []
    while waiting and len(seen) < MAX_CHAIN:
        current = waiting.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, BaseExceptionGroup):
            # A group is raised where tasks are awaited. The actual error is its first member.
            waiting = [current.exceptions[0], *waiting]
        if isinstance(current, SyntaxError) and current.filename and current.lineno:
            yield Frame(current.filename, current.lineno, "<module>", _module_of(current.filename))
        yield from getattr(current, "frames", ())  # frames of another process, see rllm_core.sandbox.ChildError
        walked = [Frame.of(frame, line) for frame, line in traceback.walk_tb(current.__traceback__)]
        if isinstance(current, BaseExceptionGroup):
            raised += reversed(walked)  # where tasks are awaited: only a fallback
        else:
            yield from reversed(walked)
        waiting.append(current.__cause__ or (None if current.__suppress_context__ else current.__context__))
    yield from raised


def _place(frame: Frame) -> CodePlace | None:
    top = frame.module.partition(".")[0]
    if top == CORE or frame.file.startswith("<"):
        return None
    owners = _owners().get(top, ())
    if owners:
        label = {(owner.package, owner.version) for owner in owners}
        distribution, version = label.pop() if len(label) == 1 else (None, None)
        plugin = _nearest(frame.module, owners)
        return CodePlace(_from_package(frame.file, top), frame.line, frame.function, plugin, distribution, version)
    if _is_library(frame.file):
        return None
    return CodePlace(_from_here(frame.file), frame.line, frame.function)


@cache
def _owners() -> dict[str, tuple[Candidate, ...]]:
    """Plugins by the top-level packages of their distributions."""
    found: dict[str, dict[tuple[str, str], Candidate]] = {}
    for candidate in (*installed_plugins(), *_learned.values()):
        for top in _packages(candidate):
            found.setdefault(top, {}).setdefault((candidate.package, candidate.name), candidate)
    return {top: tuple(candidates.values()) for top, candidates in found.items()}


def _packages(candidate: Candidate) -> set[str]:
    names = {candidate.value.partition(":")[0].partition(".")[0].strip()}
    for file in candidate.files:
        if file.suffix == ".py" and ".." not in file.parts:
            names.add(file.parts[0].removesuffix(".py"))
    return {name for name in names if name.isidentifier()} - sys.stdlib_module_names - {CORE}


def _nearest(module: str, owners: Iterable[Candidate]) -> str | None:
    """Returns the only owner, otherwise the plugin whose module is ``module`` or the closest package above it."""
    by_module: dict[str, set[str]] = {}
    for owner in owners:
        by_module.setdefault(owner.value.partition(":")[0].strip(), set()).add(owner.name)
    every = set().union(*by_module.values())
    if len(every) == 1:
        return every.pop()
    above = [name for name in by_module if module == name or module.startswith(f"{name}.")]
    names = by_module[max(above, key=len)] if above else set()
    return names.copy().pop() if len(names) == 1 else None


def _from_package(file: str, top: str) -> str:
    parts = Path(file).parts
    for number in range(len(parts) - 1, -1, -1):
        if parts[number] in (top, f"{top}.py"):
            return str(Path(*parts[number:]))
    return file


def _from_here(file: str) -> str:
    try:
        here = Path.cwd()
        return str(Path(file).relative_to(here)) if here != Path(here.anchor) else file
    except (ValueError, OSError):  # elsewhere, or the working directory is gone
        return file


@cache
def _is_library(file: str) -> bool:
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    path, folders = Path(file), (*map(Path, installed), Path(__file__).parent)
    return bool(SITE_FOLDERS & set(path.parts)) or any(path.is_relative_to(folder) for folder in folders)


def _module_of(file: str) -> str:
    """Returns the module name of a file on ``sys.path``, or ""."""
    for folder in filter(None, sys.path):
        if Path(file).is_relative_to(folder):
            return ".".join(Path(file).relative_to(folder).with_suffix("").parts)
    return ""
