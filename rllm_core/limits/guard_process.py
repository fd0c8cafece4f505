"""Process that watches a run from outside, see `rllm_core.limits.guard`; run as a script.

Arguments: descriptor of the heartbeats, descriptor of the stacks, pid of the run, the signal that asks for a stack, and
the advice to print. A heartbeat is a line with two numbers: the maximum seconds until the next heartbeat, and the
maximum once the run has been asked to stop. Time in which the main thread of the run is runnable but gets no processor
does not count: on a busy machine, the heartbeats of a working run are late, too.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

GOODBYE = b"bye\n"
POLL_SECONDS = 0.5
ANSWER_SECONDS = 5.0
MAX_STACK_BYTES = 1 << 16
SHOWN_LINES = 30


class Watch:
    """State of the watched run.

    Args:
        beats: Descriptor of the heartbeats.
        dumps: Descriptor of the stacks.
        pid: Process id of the run.
    """

    def __init__(self, beats: int, dumps: int, pid: int) -> None:
        self.beats = beats
        self.dumps = dumps
        self.pid = pid
        self.limit_seconds = self.stopping_seconds = float("inf")
        self.silent_seconds = 0.0  # since the last heartbeat
        self.counted_seconds = 0.0  # since the watch started
        self.is_stopping = False
        self.has_ended = False
        self.said_goodbye = False
        self.stack = b""
        self._line = b""
        self._open = [beats, dumps]
        self._cpu_seconds = self._main_thread()[1]

    def wait(self) -> None:
        """Reads input for at most `POLL_SECONDS`, and counts the time in which the run itself made no progress."""
        began = time.monotonic()
        ready, _, _ = select.select(self._open, [], [], POLL_SECONDS)
        for descriptor in ready:
            data = os.read(descriptor, MAX_STACK_BYTES)
            if not data:
                self._open.remove(descriptor)
                self.has_ended = self.has_ended or descriptor == self.beats
            elif descriptor == self.beats:
                self._beat(data)
            else:
                self.is_stopping = True
                self.stack = (self.stack + data)[-MAX_STACK_BYTES:]
        if os.getppid() != self.pid:
            self.has_ended = True
        seconds = self._count(min(time.monotonic() - began, 2 * POLL_SECONDS))
        self.silent_seconds += seconds
        self.counted_seconds += seconds

    @property
    def is_blocked(self) -> bool:
        """Whether the heartbeat is overdue."""
        return self.silent_seconds > (self.stopping_seconds if self.is_stopping else self.limit_seconds)

    def _beat(self, data: bytes) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line + b"\n" == GOODBYE:
                self.said_goodbye = True
            else:
                limit, stopping = line.split()
                self.limit_seconds, self.stopping_seconds = float(limit), float(stopping)
        if lines:
            self.silent_seconds = 0.0

    def _count(self, seconds: float) -> float:
        """Returns how many of the last ``seconds`` count.

        All of them if the main thread sleeps, its processor time if it is runnable, and none if it is suspended.
        """
        state, cpu_seconds = self._main_thread()
        used, self._cpu_seconds = cpu_seconds - self._cpu_seconds, cpu_seconds
        if state in ("T", "t"):
            return 0.0
        return min(used, seconds) if state == "R" else seconds

    def _main_thread(self) -> tuple[str, float]:
        """Returns the state and the processor time of the main thread.

        Returns "" and 0 if the thread has ended, or if this system has no /proc; then all time counts.
        """
        try:
            stat = Path(f"/proc/{self.pid}/task/{self.pid}/stat").read_bytes()
        except OSError:
            return "", 0.0
        fields = stat.rpartition(b")")[2].split()
        return fields[0].decode(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Watches until the run sends `GOODBYE` or has ended; kills the run if it is blocked."""
    beats, dumps, pid, ask = (int(argument) for argument in sys.argv[1:5])
    advice = sys.argv[5]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the run, which then sends GOODBYE
    watch = Watch(beats, dumps, pid)
    while not (watch.said_goodbye or watch.has_ended or watch.is_blocked):
        watch.wait()
    if watch.said_goodbye:
        return
    if watch.has_ended:
        say(f"error: the process of the run ended without closing its files (a crash, kill -9 or os._exit). {advice}")
        return
    watch.stack = b""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, ask)
        asked = watch.counted_seconds
        while not (watch.said_goodbye or watch.has_ended) and watch.counted_seconds - asked < ANSWER_SECONDS:
            watch.wait()
        if watch.said_goodbye or watch.has_ended:
            return
        os.kill(pid, signal.SIGKILL)
    lines = watch.stack.decode(errors="replace").splitlines()
    say(
        f"error: the event loop has been blocked for {watch.silent_seconds:.0f} s by a call in C that holds the "
        "interpreter, so the run was ended; its stack, innermost call first:\n"
        + "\n".join(lines[:SHOWN_LINES])
        + f"\n{advice}"
    )


def say(text: str) -> None:
    """Prints to the run's stderr, if it is still open."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode() + b"\n")


if __name__ == "__main__":
    main()
