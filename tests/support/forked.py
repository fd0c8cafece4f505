"""Runs commands and programs in forks of one process that has imported torch: each costs a fork and not a start.

A fork has a main thread, signals, standard streams and an end of its own, like any process. It shares the seed of
string hashes with the other forks, so a test of equal bytes needs a real process for one of the runs.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

POLL_SECONDS = 0.02


@dataclass
class Forked:
    """A process that `Forks` has started.

    Attributes:
        pid: Its process id, which is not used again before its end has been asked for.
        folder: Folder with the files ``stdout`` and ``stderr``.
        server: Process that started it.
        returncode: Its exit code, negative after a signal; ``None`` while it runs.
    """

    pid: int
    folder: Path
    server: Forks
    returncode: int | None = None

    @property
    def out(self) -> str:
        """What it has printed."""
        return (self.folder / "stdout").read_text(encoding="utf-8", errors="replace")

    @property
    def err(self) -> str:
        """What it has printed to standard error."""
        return (self.folder / "stderr").read_text(encoding="utf-8", errors="replace")

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None:
            self.returncode = self.server.ask({"pid": self.pid})
        return self.returncode

    def wait(self, seconds: float = 1800.0) -> int:
        """Waits for its end.

        Raises:
            TimeoutError: If it does not end in time; it is killed.
        """
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.send_signal(signal.SIGKILL)
                self.wait()
                raise TimeoutError(f"still running after {seconds:g} s:\n{self.err}")
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


@dataclass
class Forks:
    """Starts processes as forks of one."""

    process: subprocess.Popen[str]

    def ask(self, request: dict[str, Any]) -> Any:
        """Sends a request; returns the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(
        self,
        arguments: Sequence[str],
        *,
        output: Path,
        folder: Path | None = None,
        environment: Mapping[str, str] = os.environ,
        path: Sequence[str] = (),
        program: str = "",
    ) -> Forked:
        """Starts ``rllm-core``, or a Python program.

        Args:
            arguments: Arguments of the command or program.
            output: Folder for what it prints, see `Forked`.
            folder: Working directory; that of this process by default.
            environment: All its environment variables. Those that Python or torch reads at its start have no effect.
            path: Folders ahead of ``sys.path``.
            program: File with the program.
        """
        output.mkdir(parents=True, exist_ok=True)
        for name in ("stdout", "stderr"):  # before the fork opens them, somebody may already read them
            (output / name).write_bytes(b"")
        request = {
            "arguments": [program or "rllm-core", *arguments], "program": program, "output": str(output),
            "folder": str(folder or Path.cwd()), "environment": dict(environment), "path": list(path),
        }  # fmt: skip
        return Forked(self.ask(request), output, self)


@contextmanager
def forks() -> Iterator[Forks]:
    """A process to fork from. It imports what a command that trains on backend ``local`` does."""
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield Forks(process)
    finally:
        process.communicate(timeout=600)
    assert process.returncode == 0


def serve() -> None:
    """Forks for each request with arguments; answers each other one with the exit code of a fork."""
    for line in sys.stdin:
        request = json.loads(line)
        if "arguments" in request:
            answer: int | None = os.fork()
            if not answer:
                run(request)
        else:
            ended, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        print(json.dumps(answer), flush=True)


def run(request: dict[str, Any]) -> NoReturn:
    """Is the command or the program, until the end of this process."""
    for descriptor, place, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, os.path.join(request["output"], "stdout"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC),  # noqa: PTH118
        (2, os.path.join(request["output"], "stderr"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC),  # noqa: PTH118
    ):
        opened = os.open(place, mode)
        os.dup2(opened, descriptor)
        os.close(opened)
    # A shell starts commands in the background with SIGINT ignored, nohup with SIGHUP, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - without what has been read of the requests
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    sys.path[:0] = request["path"]
    if request["program"]:
        runpy.run_path(request["program"], run_name="__main__")
    else:
        cli.main()
    sys.exit(0)


if __name__ == "__main__":
    gc.disable()  # it finds nothing in these imports
    import preloaded  # noqa: F401 - not for those who only import this module

    gc.enable()

    from rllm_core import cli

    sys.path.remove(str(Path(__file__).parent))
    serve()
