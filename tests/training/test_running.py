"""Tests that the event loop of a command ends, whatever its tasks and threads do."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from rllm_core.errors import Escaped, RunError, StallError
from rllm_core.limits import timeouts as deadlines
from rllm_core.limits.running import run
from rllm_core.limits.timeouts import within


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr("rllm_core.limits.running.GRACE_SECONDS", 0.05)


def test_it_returns_what_the_coroutine_returns_and_leaves_nothing() -> None:
    async def main() -> int:
        asyncio.ensure_future(asyncio.sleep(3600))  # noqa: RUF006 - dropped on purpose, as users do
        return await asyncio.to_thread(lambda: 3)

    left: list[str] = []
    assert run(main(), left) == 3
    assert left == []


def test_the_traceback_of_an_error_has_nothing_but_the_error() -> None:
    async def main() -> None:
        raise ValueError("of a workflow")

    with pytest.raises(ValueError, match="of a workflow") as raised:
        run(main(), [])
    assert raised.value.__context__ is None


@pytest.mark.filterwarnings("ignore:unclosed")
def test_a_task_that_ignores_its_cancellation_is_named_and_left() -> None:
    ended = threading.Event()

    async def stubborn() -> None:
        while not ended.is_set():
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        kept.append(asyncio.create_task(stubborn(), name="stubborn one"))
        await asyncio.sleep(0)

    left: list[str] = []
    kept: list[asyncio.Task[None]] = []
    run(main(), left)
    assert len(left) == 1
    assert left[0].startswith("stubborn one at ")
    assert "test_running.py:" in left[0]
    ended.set()
    loop = kept[0].get_loop()
    kept[0].cancel()
    loop.run_until_complete(asyncio.wait(kept))
    loop.close()


@pytest.mark.filterwarnings("ignore:unclosed")
def test_a_thread_of_the_pool_that_does_not_end_is_named_and_left() -> None:
    release = threading.Event()
    loops = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        loops[0].run_in_executor(None, release.wait)

    left: list[str] = []
    run(main(), left)
    assert len(left) == 1
    assert left[0].startswith("thread asyncio_0")
    release.set()
    loops[0].close()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_task_that_exits_fails_who_awaits_it_and_nobody_else(error: type[BaseException]) -> None:
    async def exits() -> None:
        raise error(3)

    async def main() -> str:
        task = asyncio.create_task(exits())
        try:
            await task
        except error as leaving:
            return f"left with {leaving}"
        return "stayed"

    assert run(main(), []) == "left with 3"


def test_the_code_that_is_run_cannot_choose_the_exit_code() -> None:
    async def main() -> None:
        raise SystemExit(0)

    with pytest.raises(Escaped, match="SystemExit: 0"):
        run(main(), [])


def test_a_task_that_exits_when_it_is_stopped_does_not_change_the_result() -> None:
    async def exits() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise SystemExit(0) from None

    async def main() -> int:
        for task in [asyncio.create_task(exits()) for _ in range(2)]:
            task.set_name("exits")
        await asyncio.sleep(0)
        return 3

    assert run(main(), []) == 3


def test_ctrl_c_before_the_first_await_interrupts() -> None:
    async def main() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        run(main(), [])


def test_a_call_that_is_cancelled_from_within_is_named_with_its_line() -> None:
    async def cancels_itself() -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        await within(60.0, "the call", cancels_itself())

    with pytest.raises(
        RunError, match=r"the call was cancelled from within at .*test_running.py:\d+ in cancels_itself\("
    ):
        run(main(), [])


def test_a_run_that_is_cancelled_from_within_is_an_error() -> None:
    async def main() -> None:
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(0)

    with pytest.raises(RunError, match="cancelled from within"):
        run(main(), [])


def test_a_call_that_ignores_its_deadline_is_named_with_its_line() -> None:
    release: list[asyncio.Event] = []

    async def hangs() -> None:
        release.append(asyncio.Event())
        while not release[0].is_set():
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    async def main() -> str:
        with pytest.raises(StallError) as late:
            await within(0.05, "the call", hangs())
        release[0].set()
        return str(late.value)

    left: list[str] = []
    message = run(main(), left)
    assert message.startswith("the call did not end within 0.05 s; it waits at ")
    assert "test_running.py:" in message
    assert message.endswith(", and ignored its cancellation")
    assert left == []
