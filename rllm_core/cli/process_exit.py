"""Ends the process after a command, whatever threads and exit handlers plugins have left in it."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time

import click

from rllm_core.plugins.watch import STANDARD_ERROR
from rllm_core.text import printable

EXIT_SECONDS = 20.0
EXIT_HANDLERS_SECONDS = 120.0  # exit handlers may upload something


def leave_threads(exit_code: int, is_hung: bool) -> None:
    """Ends the process if threads keep running; otherwise lets it end as usual, within a time limit.

    ``is_hung`` means that the command has already reported threads that do not stop.
    """
    latest = time.monotonic() + EXIT_SECONDS
    kept_by = [] if is_hung else _lasting_threads()
    while kept_by and time.monotonic() < latest:
        kept_by[0].join(latest - time.monotonic())
        kept_by = _lasting_threads()
    if kept_by:
        named = printable("; ".join(map(_started_by, kept_by)))
        click.echo(f"forced exit, still running after {EXIT_SECONDS:g} s: {named}", err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    if is_hung or kept_by:
        os._exit(exit_code)
    # Exit handlers may be third-party code: if they never end, this prints where they are.
    faulthandler.dump_traceback_later(EXIT_HANDLERS_SECONDS, exit=True, file=STANDARD_ERROR)


def _lasting_threads() -> list[threading.Thread]:
    """Returns threads that keep the process from ending, without those of thread pools, which Python itself stops."""
    lasting = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
    if lasting:
        from concurrent.futures.thread import _threads_queues

        lasting = [thread for thread in lasting if thread not in _threads_queues]
    return lasting


def _started_by(thread: threading.Thread) -> str:
    """Returns the name of a thread, with the plugin whose import started it."""
    from rllm_core.plugins.loading import LEFT_THREADS

    plugin = LEFT_THREADS.get(thread)
    if plugin is None:
        return thread.name
    return f"{thread.name}, started by plugin {plugin!r} (to disable it: rllm-core plugins disable {plugin})"
