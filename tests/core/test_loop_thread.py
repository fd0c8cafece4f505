"""Tests of the event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from rllm_core.limits.loop_thread import in_thread


def test_an_interrupt_returns_after_the_thread_has_ended() -> None:
    ended = []

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(3600)
        finally:
            time.sleep(0.3)
            ended.append(threading.current_thread())

    def run(runner: asyncio.Runner) -> None:
        with runner:
            runner.run(work())

    with pytest.raises(KeyboardInterrupt):
        in_thread(run)
    assert [thread.is_alive() for thread in ended] == [False]
    assert ended[0] not in threading.enumerate()
