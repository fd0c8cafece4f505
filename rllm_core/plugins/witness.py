"""Reports which plugin was being loaded when the process died, for crashes in C libraries.

A shell waits at the other end of a pipe and knows the plugin being loaded. If the pipe closes during a load, the shell
prints that; else nothing. This costs a millisecond. Only the command line uses it, since a process that merely imports
rllm-core should not start helper processes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Iterator

from rllm_core.text import printable

SHELL = "/bin/sh"
SCRIPT = 'last=; while IFS= read -r line; do last=$line; done; [ -z "$last" ] || printf "%s\\n" "$last" >&2'
STANDARD_ERROR = 2


class Witness:
    """The shell and its pipe.

    Attributes:
        is_called: Whether to use a witness. The shell starts with the first load.
    """

    def __init__(self) -> None:
        self.is_called = False
        self._pipe: int | None = None
        self._identity: tuple[int, int] | None = None
        self._loading: list[str] = []

    def call(self) -> None:
        """Enables the witness, and stack traces on crashes, for this process."""
        self.is_called = os.path.exists(SHELL) and hasattr(os, "posix_spawn")  # noqa: PTH110 - no Path at start
        faulthandler.enable(STANDARD_ERROR)

    @contextlib.contextmanager
    def loading(self, described: str, way_out: str) -> Iterator[None]:
        """Wraps an import of third-party code.

        Args:
            described: Description of the code.
            way_out: Advice on how to avoid loading it.
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
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),  # readers of our stdout must not wait for it
                ],
                setpgroup=0,  # Ctrl-C must not reach it
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
            # Other code may have closed the pipe, and the descriptor's number may now be another file.
            if (found.st_dev, found.st_ino) == self._identity:
                os.write(self._pipe, f"{printable(line)}\n".encode())
                return
        except OSError:
            pass  # the shell is gone: continue without a witness
        self._pipe, self.is_called = None, False


WITNESS = Witness()
