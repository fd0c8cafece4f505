"""Retries engine calls with growing pauses while the engine is busy or does not answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rllm_core.engine import EngineBusy
from rllm_core.seeds import derive_seed

ResultT = TypeVar("ResultT")

FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0


def pause_seconds(attempt: int, seed: int, retry_after_seconds: float = 0.0) -> float:
    """Returns the pause after failed attempt number ``attempt``: doubling up to 30 s, times 0.5 to 1.5.

    The random factor keeps requests that failed together from retrying together; it derives from the request's seed.
    """
    spread = random.Random(derive_seed(seed, "pause", attempt)).uniform(0.5, 1.5)
    doubling = min(FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1), MAX_PAUSE_SECONDS)
    return max(doubling, retry_after_seconds) * spread


async def retried(call: Callable[..., Awaitable[ResultT]], *arguments: Any, attempts: int, seed: int) -> ResultT:
    """Returns the result of ``call``, retrying after a pause while it raises `EngineBusy`.

    Raises:
        EngineBusy: If the engine was still busy in the last attempt.
    """
    for attempt in range(1, attempts):
        try:
            return await call(*arguments)
        except EngineBusy as busy:
            pause = pause_seconds(attempt, seed, busy.retry_after_seconds)
        await asyncio.sleep(pause)
    return await call(*arguments)


def unanswered(engine: str, seconds: float) -> EngineBusy:
    """Returns the error for an engine that did not answer in time; such a call may be retried."""
    return EngineBusy(f"{engine} did not answer within {seconds:g} s")
