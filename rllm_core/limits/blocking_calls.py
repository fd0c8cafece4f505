"""Finds rollouts that block the event loop: the run goes on afterwards, but all other rollouts waited for them.

A thread asks the event loop for an answer every second. If none arrives within a second, it looks at what the loop's
thread is running. Blocks that never end are the business of `rllm_core.limits.guard`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rllm_core.limits.guard import stack_of
from rllm_core.plugins.blame import place_among

BLOCK_SECONDS = 1.0
ROLLOUT = "rollout "
"""Beginning of the names of tasks that run a rollout. A backend or an engine may work on the event loop."""


@contextlib.contextmanager
def noting_blocking_calls(note: Callable[[str], None]) -> Iterator[None]:
    """Watches the current event loop, and notes each function once that blocks it during a rollout.

    Args:
        note: Called with a line, from another thread.
    """
    loop, thread, ended = asyncio.get_running_loop(), threading.get_ident(), threading.Event()
    watching = threading.Thread(target=_watch, args=(loop, thread, ended, note), name="blocking calls", daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()


def _watch(loop: asyncio.AbstractEventLoop, thread: int, ended: threading.Event, note: Callable[[str], None]) -> None:
    noted: set[tuple[str, str]] = set()
    while not ended.wait(BLOCK_SECONDS):
        answered, asked_at, first = threading.Event(), time.monotonic(), asyncio.current_task(loop)
        try:
            loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # the event loop is closed
            return
        if answered.wait(BLOCK_SECONDS):
            continue
        # On a busy machine, or after a suspension, this thread is late too, and the silence proves nothing.
        on_time = time.monotonic() - asked_at < 2 * BLOCK_SECONDS
        task, place = asyncio.current_task(loop), place_among(stack_of(sys._current_frames().get(thread)))
        name = task.get_name() if task is not None else ""
        # If many rollouts are ready at once, the answer has to wait until each of them has had its turn.
        blocks = on_time and task is first and name.startswith(ROLLOUT)
        if blocks and place is not None and (place.file, place.function) not in noted:
            noted.add((place.file, place.function))
            note(
                f"{name} blocks the event loop at {place.in_function} for more than "
                f"{BLOCK_SECONDS:g} s, and all other rollouts wait; replace the blocking call with an await, or move "
                "it to asyncio.to_thread"
            )
        while not (answered.wait(BLOCK_SECONDS) or ended.is_set()):
            pass
