"""`asyncio.run` for code that may not end: reports tasks and threads that do not stop, and continues without them."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rllm_core.errors import Escaped, RunError, StallError
from rllm_core.limits.guard import stack_of
from rllm_core.limits.loop_thread import in_thread
from rllm_core.limits.timeouts import GRACE_SECONDS, first_of, stop, whereabouts, within
from rllm_core.plugins.blame import place_among
from rllm_core.text import one_line

ResultT = TypeVar("ResultT")

POLL_SECONDS = 0.02
POOL_THREADS = 128  # for tools called with asyncio.to_thread; threads start on demand


def run(main: Coroutine[Any, Any, ResultT], left: list[str]) -> ResultT:
    """Runs ``main`` in a new event loop, then stops all remaining tasks and threads within a few seconds.

    If an event loop is already running in this thread, as in a notebook, the new one gets its own thread.

    `asyncio.run` would wait forever for a task that ignores its cancellation or for a thread of the loop's pool. It
    would also end as soon as any task raises ``SystemExit`` or ``KeyboardInterrupt``; here, such a task fails only the
    code that awaits it.

    Args:
        main: Coroutine to run.
        left: List that receives descriptions of tasks and threads that did not stop. If there are any, the event loop
            stays open, and only ``os._exit`` ends the process immediately.

    Raises:
        RunError: If ``main`` was cancelled, but not by a signal.
        Escaped: If ``main`` raised ``SystemExit``.
    """
    is_in_loop = True
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        is_in_loop = False
    # Outside the handler, else each traceback of the run would begin with its RuntimeError.
    return in_thread(lambda runner: _run(main, left, runner)) if is_in_loop else _run(main, left, asyncio.Runner())


def _run(main: Coroutine[Any, Any, ResultT], left: list[str], runner: asyncio.Runner) -> ResultT:
    threads: list[threading.Thread] = []
    pool = ThreadPoolExecutor(POOL_THREADS, "asyncio", initializer=lambda: threads.append(threading.current_thread()))
    runner.get_loop().set_default_executor(pool)
    task = runner.get_loop().create_task(main)
    try:
        return _result_of(task, runner)
    except asyncio.CancelledError:
        raise RunError(
            "the run was cancelled from within; a workflow or plugin cancelled tasks that are not its own"
        ) from None
    finally:
        rest = asyncio.all_tasks(runner.get_loop())
        left += _result_of(runner.get_loop().create_task(_stop(rest)), runner)
        pool.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + GRACE_SECONDS
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        busy = [thread for thread in threads if thread.is_alive()]
        if busy:
            left.append(first_of([f"thread {thread.name} at {standing_at(thread)}" for thread in busy]))
        if not left:
            runner.close()


def _result_of(task: asyncio.Task[ResultT], runner: asyncio.Runner) -> ResultT:
    while not task.done():
        try:
            runner.run(_end_of(task))
        except SystemExit:  # any task that raises it ends `runner.run`; only this one counts
            continue
        except KeyboardInterrupt as error:  # likewise, unless the runner raised it for SIGINT, or a second SIGINT did
            if task.cancelling() or isinstance(error.__context__, asyncio.CancelledError):
                raise
    try:
        return task.result()
    except SystemExit as error:
        raise Escaped(one_line(error)) from error  # else third-party code would choose the exit code of the process


async def _end_of(task: asyncio.Task[Any]) -> None:
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:  # SIGINT that the task itself does not handle
        task.cancel()
        await asyncio.wait([task])
        raise


async def _stop(tasks: set[asyncio.Task[Any]]) -> list[str]:
    stuck = await stop(*tasks)
    left = [whereabouts(stuck)] if stuck else []
    try:
        generators = asyncio.get_running_loop().shutdown_asyncgens()
        await within(GRACE_SECONDS, "closing the asynchronous generators", generators)
    except StallError as late:
        left.append(str(late))
    return left


def standing_at(thread: threading.Thread) -> str:
    """Returns the line of plugin or user code that a thread is running."""
    place = place_among(stack_of(sys._current_frames().get(thread.ident or 0)))
    return place.where if place is not None else "an unknown line"
