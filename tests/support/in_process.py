"""Runs the command line in this process, as separate from it as a process of its own would be."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rllm_core.cli import main


def run_in_process(
    arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], path: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs ``rllm-core`` with these arguments; returns what a process would.

    The command sees ``environment`` as its variables, ``folder`` as the working directory, ``path`` ahead of
    ``sys.path``, no loaded module of these folders and no cached plugin. All of it is restored. What only the end of a
    process shows needs a process: threads that keep it from exiting, closed streams, crashes.
    """
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        _variables(environment, folder),
        _plugins((*path, str(folder))),
        _log_on_stderr(),
        _stream(1, "stdout", out),
        _stream(2, "stderr", err),
    ):
        sys.path[:0] = path
        code = 0
        try:
            main(list(arguments))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
        return subprocess.CompletedProcess(list(arguments), code, _text(out), _text(err))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


@contextmanager
def _variables(environment: Mapping[str, str], folder: Path) -> Iterator[None]:
    given, before, directory = dict(environment), dict(os.environ), Path.cwd()  # it may be os.environ itself
    os.environ.clear()
    os.environ.update(given)
    os.chdir(folder)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.chdir(directory)


@contextmanager
def _plugins(path: Sequence[str]) -> Iterator[None]:
    """Forgets which plugins are installed, and afterwards what was imported from ``path``."""
    modules, paths = set(sys.modules), list(sys.path)
    _forget_installed()
    try:
        yield
    finally:
        sys.path[:] = paths
        for name in set(sys.modules) - modules:
            if any(Path(place).is_relative_to(folder) for place in _places(sys.modules[name]) for folder in path):
                del sys.modules[name]
        _forget_installed()


def _places(module: Any) -> list[str]:
    file = getattr(module, "__file__", None)
    return [file] if file else [str(place) for place in getattr(module, "__path__", ())]


def _forget_installed() -> None:
    importlib.invalidate_caches()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "rllm_core":
            for value in list(vars(module).values()):
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Lets warnings go to stderr, as they do in a process that configures no logging."""
    root, own = logging.getLogger(), logging.getLogger("rllm_core")
    handlers, level = list(root.handlers), own.level
    root.handlers.clear()
    own.setLevel(logging.NOTSET)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        own.setLevel(level)


@contextmanager
def _stream(descriptor: int, name: str, file: IO[bytes]) -> Iterator[None]:
    """Redirects a stream of Python and its descriptor, which child processes inherit."""
    before, kept = getattr(sys, name), os.dup(descriptor)
    before.flush()
    os.dup2(file.fileno(), descriptor)
    stream = open(descriptor, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    setattr(sys, name, stream)
    try:
        yield
    finally:
        setattr(sys, name, before)
        stream.close()
        os.dup2(kept, descriptor)
        os.close(kept)
