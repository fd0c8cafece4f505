"""``placeholder``: runs model-written programs, each in a process and a folder of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from rllm_core.sandbox import CodeResult, Limits, Sandbox

AT_ONCE = max(4, os.cpu_count() or 1)

# Limits apply before the program is compiled. Output goes to files, so the file size limit also ends endless output.
LAUNCHER = """\
import resource, runpy, sys
program, memory, output = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (output, output))
sys.argv = [program]
runpy.run_path(program, run_name="__main__")
"""


class PlaceholderSandbox(Sandbox):
    """Runs programs as this user, with limits on time, memory and output.

    A runaway program cannot stop a run. A hostile program can still access this user's files, processes and network:
    start a container in `command`, and set ``isolates = True`` once the contract checks agree.
    """

    name: ClassVar[str] = "placeholder"
    isolates: ClassVar[bool] = False

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="placeholder")

    def command(self, program: Path, limits: Limits) -> list[str]:
        """Returns the command line that runs a program; its working directory is an empty folder."""
        numbers = (str(limits.memory_bytes), str(limits.output_bytes + 1))  # one more byte shows an excess
        return [sys.executable, "-I", "-c", LAUNCHER, str(program), *numbers]

    async def run_python(self, source: str, *, stdin: str = "", limits: Limits | None = None) -> CodeResult:
        """Runs a program in a thread, so that waiting for it does not stop other rollouts."""
        chosen = limits or Limits()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, source, stdin, chosen)

    async def close(self) -> None:
        """Does not wait for running programs, which end at their time limits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, source: str, stdin: str, limits: Limits) -> CodeResult:
        with tempfile.TemporaryDirectory(prefix="rllm-program-", ignore_cleanup_errors=True) as folder:
            program, given, stdout, stderr = (Path(folder, name) for name in ("main.py", "stdin", "stdout", "stderr"))
            program.write_bytes(source.encode("utf-8", "surrogatepass"))
            given.write_bytes(stdin.encode("utf-8", "surrogatepass"))
            work = Path(folder, "work")
            work.mkdir()
            started = time.monotonic()
            with given.open("rb") as reading, stdout.open("wb") as out, stderr.open("wb") as err:
                process = subprocess.Popen(
                    self.command(program, limits),
                    stdin=reading,
                    stdout=out,
                    stderr=err,
                    cwd=work,
                    env={},  # this process's variables may hold secrets
                    start_new_session=True,
                )
                has_ended = _ends(process, limits.wall_seconds)
            seconds = time.monotonic() - started
            printed = [path.read_bytes() for path in (stdout, stderr)]
        result = CodeResult(
            outcome="finished",
            exit_code=process.returncode,
            stdout=printed[0][: limits.output_bytes].decode("utf-8", "replace"),
            stderr=printed[1][: limits.output_bytes].decode("utf-8", "replace"),
            wall_seconds=seconds,
        )
        if not has_ended:
            return replace(result, outcome="timeout", exit_code=None)
        if max(map(len, printed)) > limits.output_bytes:
            return replace(result, outcome="output_limit", exit_code=None)
        if process.returncode < 0:
            return replace(result, outcome="killed", exit_code=None)
        return result


def _ends(process: subprocess.Popen[bytes], wall_seconds: float) -> bool:
    """Waits for a program, kills its remaining processes, and returns whether it ended by itself."""
    try:
        process.wait(wall_seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):  # no process is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
