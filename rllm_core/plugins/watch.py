"""Names third-party code that takes long to load, crashes, never ends or ends the process.

During every load, a thread waits in a function that is named after the loaded code. `faulthandler` prints the
functions of all threads, so its report of a crash names the plugin and how to disable it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Iterator
from types import FunctionType
from typing import NoReturn

from rllm_core.text import printable

SLOW_IMPORT_SECONDS = 30.0
PLUGIN_DEADLINE_SECONDS = 120.0
LOAD_DEADLINE_SECONDS = 900.0  # for a class and its libraries, which take minutes on a network disk
STANDARD_ERROR = 2

logger = logging.getLogger(__name__)

_is_own_process = False


def own_process() -> None:
    """Declares that this process exists only for a command, which may end it; from now on, crashes print stacks."""
    global _is_own_process
    _is_own_process = True
    faulthandler.enable(STANDARD_ERROR)


@contextlib.contextmanager
def watched(described: str, plugin: str, *, light: bool) -> Iterator[None]:
    """Context in which code of a plugin is imported. Its prints go to stderr, since a program may read stdout.

    In a command's own process, an import that does not end in time ends the process.
    ``light`` code is a plugin's entry module, not a class with the libraries it needs.
    """
    way_out = f"to disable the plugin: rllm-core plugins disable {plugin}, or RLLM_NO_PLUGINS={plugin}"
    loaded = printable(f"{described} was being loaded; {way_out}")
    stands, ended = threading.Event(), threading.Event()
    wait = FunctionType(_wait.__code__.replace(co_name=loaded), globals())
    arguments = (stands, ended, described, plugin, light, threading.get_ident())
    beside = threading.Thread(target=wait, args=arguments, daemon=True)
    beside.start()
    stands.wait()
    try:
        with contextlib.redirect_stdout(sys.stderr), _ended_in_time(loaded, light=light):
            yield
    finally:
        ended.set()
        beside.join()  # otherwise, a crash of the next load would name this one, too


def _wait(
    stands: threading.Event, ended: threading.Event, described: str, plugin: str, light: bool, thread: int
) -> None:
    """Waits until the load has ended, and reports a slow load with its current line."""
    stands.set()
    if ended.wait(SLOW_IMPORT_SECONDS):
        return
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    where = f", now at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
    hint = f"if it never ends: rllm-core plugins disable {plugin}" if light else "large libraries can take minutes"
    logger.warning("still importing %s after %g s%s; %s", described, SLOW_IMPORT_SECONDS, where, hint)
    ended.wait()  # this function must stay on the stack, for faulthandler


@contextlib.contextmanager
def _ended_in_time(loaded: str, *, light: bool) -> Iterator[None]:
    """Ends the command's process if a load takes too long; if a load itself ends the process, names the load."""
    if not _is_own_process:
        yield
        return
    leave, process, is_loading = os._exit, os.getpid(), True

    def leave_named(status: int) -> NoReturn:  # faulthandler does not see os._exit
        if is_loading and os.getpid() == process:  # not in a fork
            os.write(STANDARD_ERROR, f"the process ended while {loaded}\n".encode())
        leave(status)

    os._exit = leave_named
    deadline_seconds = PLUGIN_DEADLINE_SECONDS if light else LOAD_DEADLINE_SECONDS
    faulthandler.dump_traceback_later(deadline_seconds, exit=True, file=STANDARD_ERROR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        os._exit, is_loading = leave, False
