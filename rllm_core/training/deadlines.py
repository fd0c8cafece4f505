"""Timeouts and stall detection: every wait for foreign code is bounded, even if it ignores its cancellation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from rllm_core.blame import Frame, place_among
from rllm_core.errors import StallError
from rllm_core.training.guard import patience

ResultT = TypeVar("ResultT")

GRACE_SECONDS = 5.0  # for code that was cancelled to clean up; then the run continues without it


class Escaped(RuntimeError):
    """Foreign code raised something that would end the event loop, such as ``SystemExit``; chained as the cause."""


async def contained(awaitable: Awaitable[ResultT]) -> ResultT:
    """Await, and keep what is no ``Exception`` from ending the event loop: a task that raises ``SystemExit`` does.

    Raises:
        Escaped: Instead of anything that is neither an ``Exception`` nor a cancellation.
    """
    try:
        return await awaitable
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise Escaped(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error


async def within(seconds: float, what: str, awaitable: Awaitable[ResultT]) -> ResultT:
    """What ``awaitable`` returns, if that is soon enough.

    Raises:
        StallError: If it takes longer than ``seconds``; it is cancelled then, and ``what`` names it.
    """
    task = asyncio.ensure_future(contained(awaitable))
    try:
        with patience(seconds):
            await asyncio.wait([task], timeout=seconds)
    except asyncio.CancelledError:
        await stop(task)
        raise
    if task.done():
        return task.result()
    place = waiting_at(task)
    late = f"{what} did not end within {seconds:g} s" + (f"; it waits at {place}" if place else "")
    if await stop(task):
        late += ", and ignored its cancellation"
    raise StallError(late)


async def stop(*tasks: asyncio.Task[Any]) -> list[asyncio.Task[Any]]:
    """Cancel ``tasks`` and wait for them to end, for at most `GRACE_SECONDS`; how they ended does not matter.

    Returns:
        Those that ignored it and still run.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GRACE_SECONDS)
    for task in tasks:
        task.add_done_callback(_seen)
    return [task for task in tasks if not task.done()]


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # or asyncio would report it as never retrieved


async def in_thread(call: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Run ``call`` in a thread of its own: the event loop's pool may be full of a workflow's work that never ends."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="rllm-core")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, call, *arguments)
    finally:
        thread.shutdown(wait=False)


def waiting_at(task: asyncio.Task[Any]) -> str | None:
    """Where a suspended task waits: the innermost line that is a plugin's or the user's own; None if there is none."""
    frames = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = next((f for name in ("cr", "gi", "ag") if (f := getattr(awaited, f"{name}_frame", None))), None)
        if frame is not None:
            code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
            frames.append(Frame(code.co_filename, frame.f_lineno, code.co_name, module))
        awaiting = ("cr_await", "gi_yieldfrom", "ag_await")
        awaited = next((getattr(awaited, name) for name in awaiting if hasattr(awaited, name)), None)
    place = place_among(reversed(frames))
    return f"{place.where} in {place.function}()" if place is not None else None


def whereabouts(tasks: Iterable[asyncio.Task[Any]], shown: int = 3) -> str:
    """Names tasks, each with the line where it waits."""
    return first_of([f"{task.get_name()} at {waiting_at(task) or 'an unknown line'}" for task in tasks], shown)


def first_of(names: Sequence[str], shown: int = 3) -> str:
    """The first few of ``names`` and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


async def watch(progress: Callable[[], int], limit_seconds: float, where: Callable[[], str]) -> NoReturn:
    """Turn no progress at all into an error.

    Args:
        progress: A number that changes with everything that happens.
        limit_seconds: For how long it may stay the same.
        where: Says where everything is.

    Raises:
        StallError: If it stays the same for longer.
    """
    seen, since = progress(), time.monotonic()
    while True:
        await asyncio.sleep(min(limit_seconds / 10, 5.0))
        if progress() != seen:
            seen, since = progress(), time.monotonic()
        elif time.monotonic() - since > limit_seconds:
            raise StallError(f"nothing happened for {limit_seconds:g} s {where()}")
