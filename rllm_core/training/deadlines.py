"""Nothing waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

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
