"""Tests deadlines of equal length: each task stops at its own, and other cancellations propagate.

On a virtual clock, so that no deadline depends on how busy the machine is.
"""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import virtual_clock
from rllm_core.limits.shared_timer import Deadline, SharedTimer
from rllm_core.limits.timeouts import waiting_at


def test_each_wait_ends_at_its_own_deadline() -> None:
    async def wait(timer: SharedTimer, begins: float, lasts: float) -> str:
        await asyncio.sleep(begins)
        deadline = timer.deadline()
        try:
            with deadline:
                await asyncio.sleep(lasts)
        except TimeoutError:
            assert deadline.expired
            return "late"
        assert not deadline.expired
        return "in time"

    async def run() -> list[str]:
        timer = SharedTimer(0.1)
        waits = [(0.0, 9.0), (0.02, 0.01), (0.04, 9.0), (0.09, 0.05), (0.12, 9.0), (0.25, 0.0), (0.3, 9.0)]
        results = await asyncio.gather(*(wait(timer, *times) for times in waits))
        assert not timer._running
        return results

    expected = ["late", "in time", "late", "in time", "late", "in time", "late"]
    assert virtual_clock.run(run()) == expected


def test_thousands_of_waits_keep_one_timer_and_nothing_of_those_that_have_ended() -> None:
    async def run() -> None:
        timer = SharedTimer(60.0)
        timers = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
        with timer.deadline():  # an older deadline that is still running
            for _ in range(1000):
                with timer.deadline():
                    await asyncio.sleep(0)
            assert len(timer._running) == 1
            assert len(timers) == 1

    virtual_clock.run(run())


def test_the_timer_of_a_loop_that_is_closed_serves_no_other() -> None:
    timer = SharedTimer(0.02)

    async def run() -> None:
        with pytest.raises(TimeoutError, match=r"0\.02 s"), timer.deadline():
            await asyncio.sleep(9)

    async def short() -> None:
        with timer.deadline():
            await asyncio.sleep(0)

    virtual_clock.run(short())  # leaves a timer of a closed event loop
    virtual_clock.run(run())


def test_a_deadline_within_a_deadline() -> None:
    async def nested(inner: SharedTimer, outer: SharedTimer) -> None:
        with outer.deadline() as whole:
            with pytest.raises(TimeoutError, match=r"0\.02 s"), inner.deadline():
                await asyncio.sleep(9)
            assert not whole.expired
            await asyncio.sleep(9)

    async def run() -> None:
        with pytest.raises(TimeoutError, match=r"0\.05 s"):
            await nested(SharedTimer(0.02), SharedTimer(0.05))
        current = asyncio.current_task()
        assert current is not None
        assert current.cancelling() == 0

    virtual_clock.run(run())


def test_a_cancellation_at_the_same_moment_is_not_a_timeout() -> None:
    async def wait(timer: SharedTimer) -> None:
        with timer.deadline():
            await asyncio.sleep(9)

    async def run() -> None:
        timer = SharedTimer(3600.0)
        task = asyncio.create_task(wait(timer))
        await asyncio.sleep(0)
        next(iter(timer._running)).expire()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelling() == 1, "only the deadline's own wish is taken back"

    virtual_clock.run(run())


def test_an_error_of_the_body_stays_what_it_is() -> None:
    async def stubborn(timer: SharedTimer) -> str:
        with timer.deadline() as deadline:
            try:
                await asyncio.sleep(9)
            except asyncio.CancelledError:
                assert deadline.expired
        return "done anyhow"

    async def failing(timer: SharedTimer) -> None:
        with timer.deadline():
            await asyncio.sleep(0)
            raise TimeoutError("its own")

    async def run() -> None:
        timer = SharedTimer(0.01)
        assert await stubborn(timer) == "done anyhow"
        with pytest.raises(TimeoutError, match="its own"):
            await failing(timer)

    virtual_clock.run(run())


def test_there_is_no_deadline_outside_of_a_task() -> None:
    async def run() -> None:
        failure: list[str] = []

        def callback() -> None:
            with pytest.raises(RuntimeError, match="only a task"), SharedTimer(1.0).deadline():
                failure.append("entered")

        asyncio.get_running_loop().call_soon(callback)
        await asyncio.sleep(0.01)
        assert not failure

    virtual_clock.run(run())


def test_what_needs_no_wait_has_no_deadline_and_what_waits_has_one_from_then_on() -> None:
    async def at_once(result: str) -> str:
        return result

    async def wrong() -> str:
        raise ValueError("wrong")

    async def slow(seconds: float) -> str:
        await asyncio.sleep(0)  # yields None, like no future does
        await asyncio.sleep(seconds)
        await asyncio.sleep(seconds)
        return "slow"

    async def run() -> None:
        timer = SharedTimer(1.0)
        begin, begins = timer._begin, list[Deadline]()

        def noted(deadline: Deadline) -> None:
            begins.append(deadline)
            begin(deadline)

        timer._begin = noted  # type: ignore[method-assign]
        at_once_deadline = timer.deadline()
        assert await at_once_deadline.limit(at_once("done")) == "done"
        with pytest.raises(ValueError, match="wrong"):
            await timer.deadline().limit(wrong())
        assert not at_once_deadline.begun
        assert not begins
        deadline = timer.deadline()
        assert await deadline.limit(slow(0.4)) == "slow"
        assert begins == [deadline]
        assert deadline.begun
        assert not deadline.expired
        late = timer.deadline()
        with pytest.raises(TimeoutError, match="not done within 1 s"):
            await late.limit(slow(0.6))
        assert late.expired
        future = asyncio.get_running_loop().create_future()
        future.set_result("a future")
        assert await timer.deadline().limit(future) == "a future"
        with pytest.raises(TypeError, match="can't be used in 'await' expression"):
            await timer.deadline().limit(["no awaitable"])  # type: ignore[arg-type]
        assert not timer._running

    virtual_clock.run(run())


@pytest.mark.parametrize("waits_before", [0, 1])
def test_a_cancellation_reaches_what_waits_which_may_clean_up(waits_before: int) -> None:
    events: list[str] = []

    async def careful() -> str:
        try:
            for _ in range(waits_before):
                await asyncio.sleep(0)
            await asyncio.sleep(3600.0)
        except asyncio.CancelledError:
            events.append("cancelled")
            await asyncio.sleep(0.5)
            events.append("cleaned up")
            raise
        return "never"

    async def run() -> None:
        timer = SharedTimer(1.0)
        task = asyncio.create_task(timer.deadline().limit(careful()))
        await asyncio.sleep(0.1)
        assert "careful()" in str(waiting_at(task))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not timer._running

    virtual_clock.run(run())
    assert events == ["cancelled", "cleaned up"]


def test_what_is_abandoned_while_it_waits_is_closed() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(3600.0)
        finally:
            ended.append("closed")

    async def run() -> None:
        call = SharedTimer(1.0).deadline().limit(waits())
        call.send(None)
        call.close()

    virtual_clock.run(run())
    assert ended == ["closed"]
