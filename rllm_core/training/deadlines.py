"""Nothing waits for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

from rllm_core.errors import StallError

ResultT = TypeVar("ResultT")


async def within(seconds: float, what: str, awaitable: Awaitable[ResultT]) -> ResultT:
    """What ``awaitable`` returns, if that is soon enough.

    Raises:
        StallError: If it takes longer than ``seconds``; it is cancelled then, and ``what`` names it.
    """
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await awaitable
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise StallError(f"{what} did not end within {seconds:g} s") from error


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


async def stop(*tasks: asyncio.Task[None]) -> None:
    """Cancel ``tasks`` and wait until they have ended; how they ended is nobody's concern any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
