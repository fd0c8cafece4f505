"""Guard that ends a run whose event loop is blocked by a callback, in Python or in C.

Timeouts and signal handlers of the process are callbacks too, so they cannot help. A child process
(`rllm_core.limits.guard_process`) therefore expects a heartbeat of the event loop. If no heartbeat arrives for longer
than the run file allows, not counting time in which the run gets no processor, the child asks for the stack with a
signal. ``faulthandler`` answers the signal even while C code holds the interpreter, and passes it on to Python. If
Python can handle the signal, it reports the rollout and the line, and ends the process; otherwise the child prints the
stack and kills the process. The files of the run are complete up to the last event, and the run can be resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Iterator
from types import FrameType
from typing import Any, NoReturn, Self, TypeVar

from rllm_core.limits import guard_process
from rllm_core.limits.loop_thread import stopping_signals
from rllm_core.plugins.blame import Frame, place_among

ResultT = TypeVar("ResultT")

BEAT_SECONDS = 1.0
# If a loop is still blocked this long after SIGTERM, it will not handle the signal either.
SIGNALLED_SECONDS = 15.0
MARGIN_SECONDS = 10.0
ASK = getattr(signal, "SIGRTMAX", signal.SIGUSR2 + 1) - 1

_patience: list[float] = []  # timeouts of calls that may block the loop
_active: list[Guard] = []


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Allows the event loop to block for ``seconds``: a backend may work on the event loop itself."""
    _patience.append(seconds)
    _beat_all()
    try:
        yield
    finally:
        _patience.remove(seconds)
        _beat_all()


def leave(exit_code: int, message: str = "") -> NoReturn:
    """Exits the process immediately, without guards reporting a crash."""
    for guard in _active:
        guard.write(guard_process.GOODBYE)
    if message:
        os.write(2, f"\n{message}\n".encode())
    os._exit(exit_code)


def stack_of(frame: FrameType | None) -> list[Frame]:
    """Lists a frame and its callers, innermost first, without what only waits for the outermost event loop."""
    frames: list[Frame] = []
    loop = None
    while frame is not None:
        if frame.f_globals.get("__name__") == "asyncio.base_events":
            loop = len(frames)
        frames.append(Frame.of(frame))
        frame = frame.f_back
    return frames[:loop]


def _beat_all() -> None:
    for guard in _active:
        guard.beat()


class Guard:
    """Watches the current event loop, and ends the process if the loop blocks. Works on the main thread only.

    Args:
        limit_seconds: Longest time that the event loop may block outside `patience`.
        advice: Next step for the user, for the message.
    """

    def __init__(self, limit_seconds: float, advice: str) -> None:
        self.limit_seconds = limit_seconds
        self.advice = advice
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("a Guard works on the main thread only")
        self._loop = asyncio.get_running_loop()
        beats, self._beats = os.pipe()
        dumps, self._dumps = os.pipe()
        for descriptor in (self._beats, self._dumps):
            os.set_blocking(descriptor, False)
        command = [sys.executable, "-I", "-S", guard_process.__file__]
        arguments = [str(beats), str(dumps), str(os.getpid()), str(int(ASK)), self.advice]
        self._process = subprocess.Popen(
            [*command, *arguments], pass_fds=(beats, dumps), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(beats)
        os.close(dumps)
        self._before: Any = signal.signal(ASK, self._blocked)
        # The dump for SIGTERM tells the child that the run should stop, even if no Python code can run. Only the main
        # thread's stack is dumped: other threads keep running, and walking their stacks could crash the process.
        self._dumping = (ASK, *stopping_signals())
        for number in self._dumping:
            faulthandler.register(number, file=self._dumps, all_threads=False, chain=True)
        _active.append(self)
        self._tick()
        return self

    def __exit__(self, *_: object) -> None:
        _active.remove(self)
        if self._timer is not None:
            self._timer.cancel()
        for number in self._dumping:
            faulthandler.unregister(number)
        signal.signal(ASK, self._before)
        self.write(guard_process.GOODBYE)
        os.close(self._beats)
        os.close(self._dumps)
        self._process.wait()

    def beat(self) -> None:
        """Sends a heartbeat with the time until the next one, which respects `patience`."""
        longest = max(_patience, default=0.0)
        silence = max(longest, self.limit_seconds) + MARGIN_SECONDS
        self.write(f"{silence:g} {max(longest, SIGNALLED_SECONDS):g}\n".encode())

    def _tick(self) -> None:
        self.beat()
        self._timer = self._loop.call_later(BEAT_SECONDS, self._tick)

    def write(self, line: bytes) -> None:
        """Writes to the child process."""
        # Full or closed pipe: the child is stopped or has ended, which must not end the run.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._beats, line)

    def _blocked(self, number: int, frame: FrameType | None) -> NoReturn:
        place, task = place_among(stack_of(frame)), asyncio.current_task(self._loop)
        what = task.get_name() if task is not None else "a callback"
        where = f" at {place.in_function}" if place is not None else ""
        message = (
            f"error: {what} blocks the event loop{where}, so the run cannot continue and was ended; replace "
            f"the blocking call with an await, or move it to asyncio.to_thread. {self.advice}"
        )
        leave(1, message)


async def guarded(main: Awaitable[ResultT], limit_seconds: float) -> ResultT:
    """Awaits ``main`` with a `Guard`, for commands that have nothing to resume."""
    with Guard(limit_seconds, "Nothing was changed on the disk."):
        return await main
