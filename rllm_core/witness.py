"""Says which plugin was being loaded when the process died: of a crash in a C library, nobody in it is left to say so.

A shell waits at the other end of a pipe and knows what is being loaded. When the pipe closes while something is, it
prints that; else nothing. It costs a millisecond, and only the command line has one: a process that merely uses
rllm-core is not ours to equip.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Iterator

from rllm_core.foreign import printable

SHELL = "/bin/sh"
SCRIPT = 'last=; while IFS= read -r line; do last=$line; done; [ -z "$last" ] || printf "%s\\n" "$last" >&2'
STANDARD_ERROR = 2


class Witness:
    """The shell and the pipe.

    Attributes:
        is_called: Whether there is to be one; it starts with the first thing that is loaded.
    """

    def __init__(self) -> None:
        self.is_called = False
        self._pipe: int | None = None
        self._identity: tuple[int, int] | None = None
        self._loading: list[str] = []

    def call(self) -> None:
        """From now on this process has a witness, and writes down where it is when it crashes."""
        self.is_called = os.path.exists(SHELL) and hasattr(os, "posix_spawn")  # noqa: PTH110 - no Path at start
        faulthandler.enable(STANDARD_ERROR)

    @contextlib.contextmanager
    def loading(self, described: str, way_out: str) -> Iterator[None]:
        """Around the import of somebody else's code.

        Args:
            described: What it is.
            way_out: What keeps it from being loaded.
        """
        if not self.is_called:
            yield
            return
        if self._pipe is None:
            self._start()
        self._loading.append(f"the process ended while {described} was being loaded; {way_out}")
        self._say(self._loading[-1])
        try:
            yield
        finally:
            self._loading.pop()
            self._say(self._loading[-1] if self._loading else "")

    def _start(self) -> None:
        reading, writing = os.pipe()
        try:
            os.posix_spawn(
                SHELL,
                [SHELL, "-c", SCRIPT],
                {},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, reading, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),  # who reads our output waits for nobody else
                ],
                setpgroup=0,  # a Ctrl-C is not for it
            )
        finally:
            os.close(reading)
        found = os.fstat(writing)
        self._pipe, self._identity = writing, (found.st_dev, found.st_ino)

    def _say(self, line: str) -> None:
        if self._pipe is None:
            return
        try:
            found = os.fstat(self._pipe)
            # Somebody may have closed it, and what has its number now is not ours to write to.
            if (found.st_dev, found.st_ino) == self._identity:
                os.write(self._pipe, f"{printable(line)}\n".encode())
                return
        except OSError:
            pass  # the shell is gone; then there is no witness
        self._pipe, self.is_called = None, False


WITNESS = Witness()
