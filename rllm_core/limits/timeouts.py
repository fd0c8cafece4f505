"""Timeouts and stall detection: every wait for third-party code is limited, even if the code ignores cancellation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from rllm_core.errors import Escaped, RunError, StallError
from rllm_core.limits.guard import patience
from rllm_core.plugins.blame import Frame, blamed, place_among, place_of
from rllm_core.text import one_line

ResultT = TypeVar("ResultT")

GRACE_SECONDS = 5.0  # time for cancelled code to clean up; then the run continues without waiting for it


async def contained(awaitable: Awaitable[ResultT]) -> ResultT:
    """Awaits, and converts errors such as ``SystemExit`` that would end the event loop.

    Raises:
        Escaped: For an error that is neither an ``Exception`` nor a cancellation.
    """
    try:
        return await awaitable
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise Escaped(one_line(error)) from error


async def within(seconds: float, what: str, awaitable: Awaitable[ResultT]) -> ResultT:
    """Awaits with a timeout.

    Raises:
        StallError: After ``seconds``; ``awaitable`` is cancelled, and the message names it by ``what``.
        RunError: If ``awaitable`` was cancelled, but not its caller.
    """
    task = asyncio.ensure_future(contained(awaitable))
    try:
        with patience(seconds):
            await asyncio.wait([task], timeout=seconds)
    except asyncio.CancelledError:
        await stop(task)
        raise
    if task.done():
        try:
            return task.result()
        except asyncio.CancelledError as error:  # nothing cancelled the caller, which must not end as if it were
            origin = place_of(error)
            at = f" at {origin.in_function}" if origin is not None else ""
            raise RunError(f"{what} was cancelled from within{at}") from error
    place = waiting_at(task)
    late = f"{what} did not end within {seconds:g} s" + (f"; it waits at {place}" if place else "")
    if await stop(task):
        late += ", and ignored its cancellation"
    raise StallError(late)


async def close_within(
    seconds: float, what: str, close: Callable[[], Awaitable[None]], note: Callable[[str], None]
) -> bool:
    """Closes third-party code whose results are complete: notes a failure instead of raising it.

    Returns whether closing ended in time.
    """
    try:
        await within(seconds, what, close())
    except StallError as stuck:
        note(f"{stuck}; leaving it running")
        return False
    except Exception as error:
        note(f"{what} failed: {blamed(error)}")
    return True


async def stop(*tasks: asyncio.Task[Any]) -> list[asyncio.Task[Any]]:
    """Cancels ``tasks`` and waits at most `GRACE_SECONDS` for them to end; ignores their results.

    Returns:
        Tasks that ignored their cancellation and are still running.
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
        task.exception()  # otherwise asyncio reports it as never retrieved


async def in_thread(call: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Runs ``call`` in a new thread: hung calls of a workflow may fill the event loop's pool."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="rllm-core")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, call, *arguments)
    finally:
        thread.shutdown(wait=False)


def waiting_at(task: asyncio.Task[Any]) -> str | None:
    """Returns where a task waits: the innermost line of plugin or user code, or None."""
    frames = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = next((f for name in ("cr", "gi", "ag") if (f := getattr(awaited, f"{name}_frame", None))), None)
        if frame is not None:
            frames.append(Frame.of(frame))
        awaiting = ("cr_await", "gi_yieldfrom", "ag_await")
        awaited = next((getattr(awaited, name) for name in awaiting if hasattr(awaited, name)), None)
    place = place_among(reversed(frames))
    return place.in_function if place is not None else None


def whereabouts(tasks: Iterable[asyncio.Task[Any]], shown: int = 3) -> str:
    """Lists tasks, each with the line where it waits."""
    return first_of([f"{task.get_name()} at {waiting_at(task) or 'an unknown line'}" for task in tasks], shown)


def first_of(names: Sequence[str], shown: int = 3) -> str:
    """Joins the first few ``names`` and the number of the others."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


async def watch(progress: Callable[[], int], limit_seconds: float, where: Callable[[], str]) -> NoReturn:
    """Raises an error if there is no progress.

    Args:
        progress: Function that returns a number, which changes whenever there is progress.
        limit_seconds: Time without progress after which the run has stalled.
        where: Function that describes where every rollout is.

    Raises:
        StallError: If the number stays the same for longer.
    """
    seen, since = progress(), time.monotonic()
    while True:
        await asyncio.sleep(min(limit_seconds / 10, 5.0))
        if progress() != seen:
            seen, since = progress(), time.monotonic()
        elif time.monotonic() - since > limit_seconds:
            raise StallError(f"nothing happened for {limit_seconds:g} s {where()}")
